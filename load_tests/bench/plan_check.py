"""`make bench-plan`: what `microturn plan` says of this machine, and what the real server then does.

Each case is planned from what is measured (`--measure`), and then goes through the real server and the client library
in the beat protocol, with more or fewer sessions than planned, a twentieth of the plan apart, until the largest number
is found of which enough turns are on time. A level that fails while others used the processor says nothing, and is
repeated.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from load_tests.bench.beat import WANTED_SHARE, Conversations, take_level
from load_tests.bench.beat_level import Level
from load_tests.bench.bystanders import DISTURBING_SHARE, bystanders
from load_tests.bench.results import RESULTS_DIR, print_table, write_result
from load_tests.bench.serving import MicroturnServer
from load_tests.bench.talks import Service, SessionTalk
from microturn.bench.about import about
from microturn.serve.child import running_server

CASES = (
    Conversations(beat_s=0.5, opening_len=60),
    Conversations(beat_s=1.0, num_input=16, num_output=8, opening_len=60),
    Conversations(beat_s=0.5, num_input=8, num_output=1, opening_len=60),
    Conversations(beat_s=1.0, opening_len=60),
)
_LEVEL_S = 6.0
# Of a plan: numbers of sessions that are tried.
_SHARES = [twentieths / 20 for twentieths in range(10, 41)]
_MOST_REPEATS = 8


def run_plan_check(model: str, numbers: Sequence[int]) -> None:
    """Plans, measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
        numbers: of the cases, from 1 on; what the file has of others stays.

    Raises:
        RuntimeError: when others never leave the machine alone.
    """
    path = RESULTS_DIR / "plan.json"
    before = json.loads(path.read_text())["cases"] if path.exists() else []
    results: dict[str, dict[str, Any]] = {result["case"]: result for result in before}
    for case in (CASES[number - 1] for number in numbers):
        plan = _undisturbed_plan(model, case)
        told = {"case": case_name(case), "about": about(), "model": model, "plan": plan}
        with running_server(model, "weights=int8", "share_prefixes=false") as address, asyncio.Runner() as runner:
            service = MicroturnServer(address, SessionTalk)
            results[case_name(case)] = told | _measured(runner, service, case, plan["sessions_by_time"])
        kept = [results[name] for name in map(case_name, CASES) if name in results]
        write_result("plan", {"protocol": __doc__, "wanted_share": WANTED_SHARE, "cases": kept})
    header = ["case", "context", "planned", "measured", "planned by measured", "p50, ms", "p99, ms"]
    print_table(header, [_cells(result) for result in results.values()])
    print("written:", path)


def case_name(case: Conversations) -> str:
    """For people."""
    return f"{case.num_input} in, {case.num_output} out, every {case.beat_s * 1e3:g} ms"


def context_len(case: Conversations) -> int:
    """Of a session in the middle of a level."""
    return case.opening_len + round(_LEVEL_S / case.beat_s) * (case.num_input + case.num_output) // 2


def rungs(planned: int) -> list[int]:
    """Numbers of sessions around a plan, from half of it to twice."""
    return sorted({max(1, round(planned * share)) for share in _SHARES})


def _measured(runner: asyncio.Runner, service: Service, case: Conversations, planned: int) -> dict[str, Any]:
    """The largest number of sessions that were on time; the largest that was tried where none failed."""
    levels: list[Level] = []
    print(f"\n{case_name(case)}: {planned} by plan", flush=True)

    def fails(num_sessions: int) -> bool:
        for _ in range(_MOST_REPEATS):
            levels.append(level := runner.run(take_level(service, num_sessions, _LEVEL_S, case)))
            print(
                f"{num_sessions} sessions: {level.on_time_share:.1%} on time, others used {level.others_share:.0%}",
                flush=True,
            )
            if level.on_time_share >= WANTED_SHARE or level.others_share <= DISTURBING_SHARE:
                return level.on_time_share < WANTED_SHARE
        raise RuntimeError("others use the processor: measure when the machine is quiet")

    tried = rungs(planned)
    first_failing = bisect_left(tried, True, key=fails)
    return {
        "context_len": context_len(case),
        "planned": planned,
        "measured": tried[first_failing - 1] if first_failing else 0,
        "has_failed_beyond": first_failing < len(tried),
        "levels": [level.as_json() for level in levels],
    }


def _undisturbed_plan(model: str, case: Conversations) -> dict[str, Any]:
    for _ in range(_MOST_REPEATS):
        with bystanders() as seen:
            plan = _plan(model, case)
        steps = ", ".join(f"{step['num_rows']} x {step['num_new']}: {step['step_ms']:.1f}" for step in plan["steps"])
        print(f"ms of a step of so many sessions x tokens: {steps}; others used {seen.share:.0%}", flush=True)
        if seen.share <= DISTURBING_SHARE:
            return plan
    raise RuntimeError("others use the processor: measure when the machine is quiet")


def _plan(model: str, case: Conversations) -> dict[str, Any]:
    command = [sys.executable, "-m", "microturn.cli", "plan", "--model", model, "--json", "--measure"]
    asked = {
        "--context": context_len(case),
        "--beat-ms": case.beat_s * 1e3,
        "--input": case.num_input,
        "--output": case.num_output,
    }
    command += [str(word) for option in asked.items() for word in option]
    plan: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return plan


def _cells(result: dict[str, Any]) -> list[object]:
    planned, measured = result["planned"], result["measured"]
    best = [level for level in result["levels"] if level["num_sessions"] == measured]
    ratio = f"{planned / measured:.2f}" if measured else "-"
    times = [best[-1]["p50_ms"], best[-1]["p99_ms"]] if best else ["-", "-"]
    least = "" if result["has_failed_beyond"] else "at least "
    return [result["case"], result["context_len"], planned, f"{least}{measured}", ratio, *times]
