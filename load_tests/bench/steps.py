"""How long a step takes for runners that differ in one thing: side by side, step by step in alternation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from microturn.model.batch import Batch, Row
from microturn.model.runner import Runner

_NUM_WARM_UP_STEPS = 3


def alternating_ms(runners: Mapping[str, Runner], rows: Sequence[Row], num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of steps of the same rows, by runner; some steps before them are not counted."""
    samples: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(_NUM_WARM_UP_STEPS + num_steps):
        for name, runner in runners.items():
            started_s = time.perf_counter()
            runner.run(Batch(rows))
            samples[name].append((time.perf_counter() - started_s) * 1e3)
    return {name: of_runner[_NUM_WARM_UP_STEPS:] for name, of_runner in samples.items()}
