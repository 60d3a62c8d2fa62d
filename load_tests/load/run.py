"""`make load`: a server, people, and what comes of it: Locust's HTML and CSV files, a JSON report and a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from load_tests.bench.bystanders import warning
from load_tests.bench.results import print_table
from load_tests.load.cores import Cores, cores_busy
from load_tests.load.locust_run import LocustRun
from load_tests.load.pictures import draw_run
from microturn.bench.about import about
from microturn.serve.child import RunningServer, started_server


def run_load(
    name: str, run: LocustRun, model: str, settings: Sequence[str], address: str = "", metrics_url: str = ""
) -> int:
    """Runs it against a server of its own, or against one that runs already.

    Args:
        name: of the scenario.
        run: what is run.
        model: what is served, by a server of its own.
        settings: of that server, `key=value`.
        address: of a server that runs already; empty for one of its own.
        metrics_url: of that one.

    Returns:
        The exit code: 0 when all thresholds were reached.
    """
    with _server(model, settings, address, metrics_url) as server, cores_busy(server.pid) as cores:
        exit_code, report = run.against(server.address, server.metrics_url)
    if report:
        _complete(name, run, address or model, settings, report, cores)
    print("passed" if exit_code == 0 else f"FAILED (exit code {exit_code})")
    return exit_code


@contextmanager
def _server(model: str, settings: Sequence[str], address: str, metrics_url: str) -> Iterator[RunningServer]:
    if address:
        yield RunningServer(address, metrics_url, os.getpid())
        return
    # Ctrl-C ends Locust, which then asks the server what it has seen.
    with started_server(model, *settings, process_group=0) as server:
        yield server


def _complete(
    name: str, run: LocustRun, served: str, settings: Sequence[str], report: dict[str, Any], cores: Cores
) -> None:
    """Adds to the report what only this side knows, writes it, draws it and prints the most important."""
    described = {
        "scenario": name,
        "served": served,
        "settings": list(settings),
        "users": run.num_users,
        "duration_s": run.run_s,
        "shape": run.shape,
        "processes": run.num_processes,
        "cores_busy": asdict(cores),
    }
    run.report_path.write_text(json.dumps({"about": about(), "run": described, **report}, indent=1) + "\n")
    picture = run.out_dir / "load.png"
    draw_run(picture, f"{name}: {run.num_users} people", report["seconds"])
    print_summary(report)
    if "load_generator" in report:
        print("load generator:", ", ".join(f"{what} {value}" for what, value in report["load_generator"].items()))
    print(warning(cores.others_share))
    print(*(f"written: {run.out_dir / file}" for file in ("report.json", "load.png", "locust.html")), sep="\n")


def print_summary(report: dict[str, Any]) -> None:
    """Prints what was seen and how the sources agree, as tables."""
    for name, seen in report["scenarios"].items():
        on_time = "" if seen["on_time_share"] is None else f", {seen['on_time_share']:.2%} of turns on time"
        counts = ", ".join(f"{num} {what}" for what, num in seen["counts"].items())
        print(f"\n{name}{on_time}: {counts}; stalled for {seen['stall_ms']:.0f} ms; errors: {seen['errors'] or 'none'}")
        header = ["ms", "number", "mean", "p50", "p90", "p99", "max"]
        rows = [
            [what, *(ms[key] for key in ("num", "mean", "p50", "p90", "p99", "max"))] for what, ms in seen["ms"].items()
        ]
        print_table(header, rows)
    if report["agreement"]:
        print("\nwho says what of a turn's latency, ms")
        names = ("source", "num", "p50_ms", "p99_ms", "left_out_ms", "client_p50_ms", "client_p99_ms")
        header = ["source", "turns", "p50", "p99", "+ what it leaves out", "client's p50", "client's p99", "deviation"]
        print_table(header, [[*(row[key] for key in names), f"{row['deviation']:.1%}"] for row in report["agreement"]])
