"""Result files: what was measured, with the machine, the versions, the state of the sources and the date."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

from microturn.bench.about import about
from microturn.bench.table import print_table as print_table

RESULTS_DIR = Path(__file__).parent / "results"


def write_result(name: str, result: Mapping[str, object], directory: Path | None = None) -> Path:
    """Writes `<name>.json` into a directory; None is `RESULTS_DIR`.

    Returns:
        Its path.
    """
    directory = directory or RESULTS_DIR
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"about": about(), **result}, indent=1) + "\n")
    return path


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile, interpolated; the median for 50."""
    if percent == 50 or len(values) == 1:
        return median(values)
    return quantiles(values, n=100, method="inclusive")[percent - 1]
