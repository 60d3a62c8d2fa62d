"""`make capacity`: how many sessions keep a beat of 200 ms with 99 % of their turns on time, and what limits it.

Each step is a run of the steady beat on the same server. If n sessions are on time, fewer are taken to be so too: the
search doubles the number until a step fails, and then halves the distance between the two. What limits is read off the
first step beyond: where the time of its late turns went, by the server's own account, and how many cores were busy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_tests.bench.results import print_table
from load_tests.load.cores import cores_busy
from load_tests.load.locust_run import LocustRun
from load_tests.load.pictures import draw_capacity
from load_tests.load.plans import PLANS
from load_tests.load.record import PARTS
from microturn.bench.about import about
from microturn.planning.beat import largest
from microturn.serve.child import RunningServer, started_server

WANTED_SHARE = 0.99


def run_capacity(model: str, settings: Sequence[str], most_users: int, step_s: int, out_dir: Path) -> int:
    """Searches, writes a JSON file and a picture, and prints a table; the exit code is 0 when at least one kept up.

    Args:
        model: what is served.
        settings: of the server, `key=value`.
        most_users: that are tried.
        step_s: seconds of each step.
        out_dir: where everything goes.
    """
    levels: list[dict[str, Any]] = []
    with started_server(model, *settings) as server:

        def is_on_time(num_users: int) -> bool:
            print(f"\n{num_users} sessions", flush=True)
            levels.append(level := _level(server, num_users, step_s, out_dir / f"{num_users}"))
            return bool(level["passed"])

        capacity = largest(is_on_time, most_users)
    beyond = next((level for level in levels if level["num_users"] == capacity + 1), None)
    limited_by = limit(beyond) if beyond is not None else f"nothing yet: no more than {most_users} were tried"
    result = {
        "about": about(),
        "protocol": __doc__,
        "model": model,
        "settings": list(settings),
        "step_s": step_s,
        "capacity": capacity,
        "limited_by": limited_by,
        "levels": levels,
    }
    (out_dir / "capacity.json").write_text(json.dumps(result, indent=1) + "\n")
    draw_capacity(out_dir / "capacity.png", levels, WANTED_SHARE)
    print(f"\n{capacity} sessions with {WANTED_SHARE:.0%} of turns on time; beyond: {limited_by}")
    columns = ("num_users", "on_time_share", "p50_ms", "p99_ms")
    rows = [[*(level[name] for name in columns), level["cores_busy"]["server"]] for level in levels]
    print_table(["sessions", "on time", "p50, ms", "p99, ms", "cores of the server"], sorted(rows))
    print(f"written: {out_dir / 'capacity.json'}\ndrawn:   {out_dir / 'capacity.png'}")
    return 0 if capacity else 1


def limit(level: dict[str, Any]) -> str:
    """What a step that failed says about the reason, in words."""
    if level["errors"]:
        return f"errors: {level['errors']}"
    late_ms, cores = level["late_turn_ms"], level["cores_busy"]
    shares = sorted(((ms, part) for part, ms in late_ms.items()), reverse=True)
    parts = ", ".join(f"{part} {ms:.0f} ms" for ms, part in shares if ms >= 1)
    busy = f"{cores['server']:.1f} of {cores['num']} cores busy for the server"
    others = f", others used {cores['others_share']:.0%} of the machine" if cores["others_share"] > 0.05 else ""
    return f"{shares[0][1] if shares else 'turns without an answer'} (a late turn: {parts}; {busy}{others})"


def _level(server: RunningServer, num_users: int, step_s: int, out_dir: Path) -> dict[str, Any]:
    run = LocustRun(PLANS["beat"].people, num_users, step_s, PLANS["beat"].thresholds, out_dir)
    with cores_busy(server.pid) as cores:
        _, report = run.against(server.address, server.metrics_url)
    if not report:
        raise RuntimeError("Locust wrote no report; it has said why")
    seen, ms = report["total"], report["total"]["ms"]
    return {
        "num_users": num_users,
        "passed": report["passed"],
        "on_time_share": seen["on_time_share"] or 0.0,
        "errors": seen["errors"],
        **{f"{name}_ms": ms["turn"][name] if "turn" in ms else None for name in ("p50", "p99")},
        "turn_ms": {part: ms[part]["mean"] for part in PARTS if part in ms},
        "late_turn_ms": seen["late_turn_ms"],
        "cores_busy": asdict(cores),
    }
