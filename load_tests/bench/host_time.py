"""How long the host takes for a step, whatever the model takes: this revision beside an earlier one.

Decode steps of 1, 10 and 100 sessions of 1,000 and of 16,000 tokens, alone and beside 2,000 sessions that wait for
their next turns, with and without penalties, over a runner without a model (see `host_steps`). What is told is the
processor time of the engine's thread per row of a step. The two revisions take turns, each in a process of its own, and
the medians of the rounds count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from statistics import median

from tqdm import tqdm

from load_tests.bench.host_steps import HostTime
from load_tests.bench.pictures import draw_host_time
from load_tests.bench.results import print_table, write_result

_ROOT = Path(__file__).parents[2]
_CONTEXT_LENS, _NUMS_ROWS, _NUMS_WAITING = (1000, 16_000), (1, 10, 100), (0, 2000)
_SIDES = ("before", "after")


def run_host_time(before: str, num_rounds: int) -> None:
    """Measures, prints a table, writes a JSON file and a picture.

    Args:
        before: the earlier revision.
        num_rounds: how often both are measured.
    """
    rounds: dict[str, list[list[HostTime]]] = {side: [] for side in _SIDES}
    with tempfile.TemporaryDirectory() as folder:
        _check_out(before, Path(folder))
        for _ in tqdm(range(num_rounds), desc="host time", unit="round", leave=False):
            for side, sources in zip(_SIDES, (Path(folder), _ROOT), strict=True):
                rounds[side].append(_measure(sources))
    times = {side: list(map(_median, zip(*of_side, strict=True))) for side, of_side in rounds.items()}
    print("\nprocessor time of the engine's thread per row of a decode step, µs")
    rows = [
        [_name(was), was.num_rows, was.context_len, _us_per_row(was), _us_per_row(now)]
        for was, now in sorted(zip(times["before"], times["after"], strict=True), key=lambda pair: _order(pair[0]))
    ]
    print_table(["", "rows", "context", f"before ({before})", "after"], rows)
    result = {
        "protocol": __doc__,
        "before": before,
        "num_rounds": num_rounds,
        "steps": {side: [asdict(row) for row in of_side] for side, of_side in times.items()},
    }
    print("written:", write_result("host-time", result))
    print("picture:", draw_host_time("host-time", {side: _by_context(of_side) for side, of_side in times.items()}))


def _check_out(revision: str, folder: Path) -> None:
    """The server's sources of a revision, and its own way to measure them."""
    archive = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", revision, "backend_src", "load_tests"], check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def _measure(sources: Path) -> list[HostTime]:
    numbers = {"--contexts": _CONTEXT_LENS, "--rows": _NUMS_ROWS, "--waiting": _NUMS_WAITING}
    arguments = [part for name, values in numbers.items() for part in (name, *map(str, values))]
    measured = subprocess.run(
        [sys.executable, "-m", "load_tests.bench.host_steps", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(sources / "backend_src")},
    )
    return [HostTime(**row) for row in json.loads(measured.stdout)]


def _median(times: Sequence[HostTime]) -> HostTime:
    first = asdict(times[0])
    return HostTime(**{**first, "step_ms": median(row.step_ms for row in times)})


def _us_per_row(row: HostTime) -> float:
    return row.step_ms * 1e3 / row.num_rows


def _name(row: HostTime) -> str:
    penalties = "penalties" if row.has_penalties else "plain"
    return f"{penalties}, {row.num_waiting:,} wait" if row.num_waiting else penalties


def _order(row: HostTime) -> tuple[bool, int, int, int]:
    return row.has_penalties, row.num_waiting, row.num_rows, row.context_len


def _by_context(times: Sequence[HostTime]) -> dict[str, dict[int, float]]:
    """Microseconds per row by tokens of context, of the largest steps."""
    lines: dict[str, dict[int, float]] = {}
    for row in sorted(times, key=_order):
        if row.num_rows == max(_NUMS_ROWS):
            lines.setdefault(_name(row), {})[row.context_len] = _us_per_row(row)
    return lines
