"""The measurements for a plan, made on this machine or read from a file: step times, and the cost of serving."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from microturn.errors import InvalidArgument, Unavailable
from microturn.planning.beat import ServingCost
from microturn.planning.step_times import MeasuredStep
from microturn.settings import MAX_IDLE_TIMEOUT_S, Settings

# Steps of each kind, in several rounds over all kinds: disturbances of a machine last for seconds, not for single
# steps.
_NUM_DECODE_STEPS, _NUM_APPEND_STEPS, _NUM_ROUNDS = 8, 4, 3
# Tokens of a session besides its context and the appended ones: of decoding turns, and the rest of a page.
_ROOM = 128


@dataclass(frozen=True)
class Measurement:
    """A measurement.

    Attributes:
        steps: steps of the engine alone.
        cost: outside of the engine; None if not measured.
    """

    steps: Sequence[MeasuredStep]
    cost: ServingCost | None


def measure(
    model_dir: Path, weights: str, kv_dtype: str, context_len: int, num_new: int, most_rows: int
) -> Measurement:
    """Measures steps in this process, and then the cost of serving; see `measure_steps` and `measure_serving`.

    Raises:
        Unavailable: the measured server does not start, or does not answer.
    """
    from microturn.planning.serving_cost import MOST_ROWS, measure_serving
    from microturn_client import MicroturnError

    steps = measure_steps(model_dir, weights, kv_dtype, context_len, num_new, most_rows)
    decodes = [step for step in steps if step.num_new == 1 and step.num_rows <= MOST_ROWS]
    widest = max(decodes, key=lambda step: step.num_rows)
    try:
        decode_s = widest.step_s * min(widest.jitter)
        cost = measure_serving(model_dir, weights, kv_dtype, context_len, widest.num_rows, decode_s)
    except (RuntimeError, MicroturnError) as error:
        raise Unavailable(f"what serving costs cannot be measured: {error}") from None
    return Measurement(steps, cost)


def longest_len(context_len: int, num_new: int) -> int:
    """Maximum tokens of a session while steps at this context are measured."""
    return context_len + max(num_new, _NUM_DECODE_STEPS) + _ROOM


def measure_steps(
    model_dir: Path, weights: str, kv_dtype: str, context_len: int, num_new: int, most_rows: int
) -> list[MeasuredStep]:
    """Loads the model and times decode steps and appends of 1, 2, 4 … sessions.

    Args:
        model_dir: of the model.
        weights: as in the settings; `kv_dtype` likewise.
        context_len: tokens of each session.
        num_new: tokens of an append.
        most_rows: sessions of the largest step.

    Raises:
        InvalidArgument: the model cannot be served, or its layers cannot be timed.
    """
    from microturn.bench.stepped_engine import SteppedEngine
    from microturn.engine.loading import load_engine

    rows = [1 << power for power in range(most_rows.bit_length()) if 1 << power < most_rows] + [most_rows]
    longest = longest_len(context_len, num_new)
    settings = Settings(
        model_dir=str(model_dir),
        weights=weights,
        kv_dtype=kv_dtype,
        max_batch_tokens=max(Settings.max_batch_tokens, most_rows * num_new),
        max_sessions=most_rows,
        kv_tokens=most_rows * longest,
        max_context=longest,
        share_prefixes=False,
        idle_timeout_s=MAX_IDLE_TIMEOUT_S,
    )
    engine = SteppedEngine(load_engine(settings))
    engine.grow(range(1, most_rows + 1), context_len)
    rounds: dict[tuple[int, int], list[list[float]]] = {(row, new): [] for row in rows for new in (1, num_new)}
    for _ in range(_NUM_ROUNDS):
        for (num_rows, new), timed in rounds.items():
            sessions = range(1, num_rows + 1)
            if new == 1:
                steps = engine.decode(sessions, _NUM_DECODE_STEPS)
            else:
                steps = engine.append(sessions, new, _NUM_APPEND_STEPS)
            timed.append([step.step_s for step in steps])
    return [summary(timed, num_rows, context_len, new) for (num_rows, new), timed in rounds.items()]


def read_measurement(path: Path) -> Measurement:
    """Reads a file written by `microturn plan --measure --json` or `microturn bench engine --json`.

    Raises:
        InvalidArgument: it is not such a file.
    """
    try:
        found = json.loads(path.read_bytes())
        costs = found.get("serving_cost_ms")
        return Measurement([_read_step(step) for step in found["steps"]], None if costs is None else _read_cost(costs))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path} has no steps of `microturn bench engine --json`: {error!r}") from None


def _read_step(values: dict[str, Any]) -> MeasuredStep:
    step = MeasuredStep(
        int(values["num_rows"]),
        int(values["context_len"]),
        int(values["num_new"]),
        float(values["step_ms"]) / 1e3,
        tuple(map(float, values.get("jitter", (1.0,)))),
    )
    # With times of 0 or less the simulation would not end.
    if min(step.num_rows, step.num_new) < 1 or not step.jitter or not all(map(_is_time, (step.step_s, *step.jitter))):
        raise ValueError(f"no step takes that: {values}")
    return step


def _read_cost(costs_ms: dict[str, Any]) -> ServingCost:
    costs_s = {f"{name}_s": float(cost_ms) / 1e3 for name, cost_ms in costs_ms.items()}
    if not all(0 <= cost_s < math.inf for cost_s in costs_s.values()):
        raise ValueError(f"nothing costs that: {costs_ms}")
    return ServingCost(**costs_s)


def _is_time(value: float) -> bool:
    return 0 < value < math.inf


def summary(rounds_s: Sequence[Sequence[float]], num_rows: int, context_len: int, num_new: int) -> MeasuredStep:
    """The median of the rounds' medians; the jitter is relative to each round's median."""
    medians_s = [median(steps_s) for steps_s in rounds_s]
    jitter = tuple(
        step_s / middle_s for steps_s, middle_s in zip(rounds_s, medians_s, strict=True) for step_s in steps_s
    )
    return MeasuredStep(num_rows, context_len, num_new, median(medians_s), jitter)
