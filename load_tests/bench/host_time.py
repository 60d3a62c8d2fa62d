"""How long the host takes for a step, whatever the model takes: this revision beside an earlier one.

Decode steps of 8, 64 and 256 sessions of 1,000 and of 16,000 tokens, alone and beside 2,000 sessions that wait for
their next turns, with and without penalties, and launched ahead as on a GPU; and 256 sessions that keep the beat, all
over a runner without a model (see `host_engine`). What is told is the processor time of the engine's thread, for a step
and for a turn. The two revisions take turns, each in a process of its own, and the medians of the rounds count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from load_tests.bench.host_beat import BeatTime
from load_tests.bench.host_steps import HostTime
from load_tests.bench.pictures import draw_host_time
from load_tests.bench.results import print_table, write_result

_ROOT = Path(__file__).parents[2]
_CONTEXT_LENS, _NUMS_ROWS, _NUMS_WAITING, _NUM_ON_BEAT = (1000, 16_000), (8, 64, 256), (0, 2000), 256
_SIDES = ("before", "after")


@dataclass(frozen=True)
class _Round:
    """What one revision takes, in one round or in the median of several."""

    steps: list[HostTime]
    beat: list[BeatTime]


def run_host_time(before: str, num_rounds: int) -> None:
    """Measures, prints a table, writes a JSON file and a picture.

    Args:
        before: the earlier revision.
        num_rounds: how often both are measured.
    """
    rounds: dict[str, list[_Round]] = {side: [] for side in _SIDES}
    with tempfile.TemporaryDirectory() as folder:
        _check_out(before, Path(folder))
        for _ in tqdm(range(num_rounds), desc="host time", unit="round", leave=False):
            for side, sources in zip(_SIDES, (Path(folder), _ROOT), strict=True):
                rounds[side].append(_measure(sources))
    times = {side: _median(of_side) for side, of_side in rounds.items()}
    was, now = (times[side] for side in _SIDES)
    print("\nprocessor time of the engine's thread, ms for a decode step")
    steps = sorted(zip(was.steps, now.steps, strict=True), key=lambda pair: _order(pair[0]))
    rows = [
        [_name(old), old.num_rows, old.context_len, f"{old.step_ms:.2f}", f"{new.step_ms:.2f}"] for old, new in steps
    ]
    print_table(["", "rows", "context", f"before ({before})", "after"], rows)
    print("\nprocessor time of the engine's thread, µs for a turn on the beat")
    beats = [[old.num_sessions, old.turn_us, new.turn_us] for old, new in zip(was.beat, now.beat, strict=True)]
    print_table(["sessions", f"before ({before})", "after"], beats)
    result = {
        "protocol": __doc__,
        "before": before,
        "num_rounds": num_rounds,
        **{kind: {side: of_side[kind] for side, of_side in _as_json(times).items()} for kind in ("steps", "beat")},
    }
    print("written:", write_result("host-time", result))
    print("picture:", draw_host_time("host-time", {side: _by_rows(of_side.steps) for side, of_side in times.items()}))


def _check_out(revision: str, folder: Path) -> None:
    """The server's sources of a revision, and its own way to measure them."""
    archive = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", revision, "backend_src", "load_tests"], check=True, stdout=subprocess.PIPE
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def _measure(sources: Path) -> _Round:
    numbers = {
        "--contexts": _CONTEXT_LENS,
        "--rows": _NUMS_ROWS,
        "--waiting": _NUMS_WAITING,
        "--beat": (_NUM_ON_BEAT,),
    }
    arguments = [part for name, values in numbers.items() for part in (name, *map(str, values))]
    measured = subprocess.run(
        [sys.executable, "-m", "load_tests.bench.host_steps", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(sources / "backend_src")},
    )
    found = json.loads(measured.stdout)
    return _Round([HostTime(**row) for row in found["steps"]], [BeatTime(**row) for row in found["beat"]])


def _median(rounds: Sequence[_Round]) -> _Round:
    steps = zip(*(of.steps for of in rounds), strict=True)
    beats = zip(*(of.beat for of in rounds), strict=True)
    return _Round(
        [replace(of[0], step_ms=median(row.step_ms for row in of)) for of in steps],
        [replace(of[0], turn_us=median(row.turn_us for row in of)) for of in beats],
    )


def _as_json(times: Mapping[str, _Round]) -> dict[str, dict[str, list[dict[str, Any]]]]:
    return {side: asdict(of_side) for side, of_side in times.items()}


def _name(row: HostTime) -> str:
    kind = "ahead" if row.is_ahead else "penalties" if row.has_penalties else "plain"
    return f"{kind}, {row.num_waiting:,} wait" if row.num_waiting else kind


def _order(row: HostTime) -> tuple[bool, bool, int, int, int]:
    return row.has_penalties, row.is_ahead, row.num_waiting, row.num_rows, row.context_len


def _by_rows(times: Sequence[HostTime]) -> dict[str, dict[int, float]]:
    """Milliseconds of a step by its rows, in the shortest context."""
    lines: dict[str, dict[int, float]] = {}
    for row in sorted(times, key=_order):
        if row.context_len == min(_CONTEXT_LENS) and not row.num_waiting:
            lines.setdefault(_name(row), {})[row.num_rows] = row.step_ms
    return lines
