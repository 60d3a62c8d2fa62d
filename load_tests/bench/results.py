"""Result files: what was measured, with the machine, the versions, the state of the sources and the date."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

import psutil

RESULTS_DIR = Path(__file__).parent / "results"


def write_result(name: str, result: Mapping[str, object]) -> Path:
    """Writes `results/<name>.json`.

    Returns:
        Its path.
    """
    RESULTS_DIR.mkdir(exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps({"about": _about(), **result}, indent=1) + "\n")
    return path


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile, interpolated; the median for 50."""
    if percent == 50 or len(values) == 1:
        return median(values)
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a Markdown table; floats with one digit."""
    cells = [list(header), *([f"{c:.1f}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    for number, row in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def _about() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(psutil.virtual_memory().total / 1e9),
            "load_before": os.getloadavg()[0],
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("microturn", "torch", "transformers", "numba", "nvidia-pytriton")},
        },
        "git": _git_state(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _git_state() -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return described.stdout.strip() or "not a checkout"
