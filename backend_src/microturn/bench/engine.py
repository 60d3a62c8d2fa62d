"""`microturn bench engine`: decode and append steps of the engine, and their parts.

* Steps: so many sessions at so long a context, each with so many new tokens in one step. Time per step and its parts
  (see `stopwatch`), tokens per second, and the bytes that a step cannot do without (each weight once, the KV of all
  contexts once) over its time, beside what this machine's memory gives, which is measured between them: it differs by
  half from one minute to the next where others use the memory too.
* Slope: the growth of a decode step per token of context, beside the time to read this token's KV at that bandwidth.
* Parked sessions: decode steps with and without many parked sessions, alternating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import linear_regression, median

from tqdm import tqdm

from microturn.bench.bandwidth import read_bandwidth
from microturn.bench.stepped_engine import Step, SteppedEngine

_ROUNDS, _NUM_DECODE_STEPS, _NUM_APPEND_STEPS = 3, 24, 8
_PARKED_LEN, _PARKED_ROWS = 16, 4


@dataclass(frozen=True)
class StepTimes:
    """Median times of steps of one kind.

    Attributes:
        num_rows: sessions.
        context_len: tokens of each before the step.
        num_new: tokens that each session computes.
        step_ms: of the whole step.
        products_ms: matrix products.
        attention_ms: attention, with writing the new keys and values.
        layer_rest_ms: the rest of the layers.
        around_ms: outside of the layers.
        tokens_per_s: new tokens of all sessions.
        bytes_per_s: weights and KV that the step must read, over its time.
    """

    num_rows: int
    context_len: int
    num_new: int
    step_ms: float
    products_ms: float
    attention_ms: float
    layer_rest_ms: float
    around_ms: float
    tokens_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Slope:
    """Growth of a decode step.

    Attributes:
        num_rows: sessions in it.
        us_per_token: microseconds per token of their contexts, by least squares.
        read_us_per_token: time to read a token's KV at the measured bandwidth.
    """

    num_rows: int
    us_per_token: float
    read_us_per_token: float

    @property
    def ratio(self) -> float:
        return self.us_per_token / self.read_us_per_token


@dataclass(frozen=True)
class Parked:
    """Decode steps beside parked sessions.

    Attributes:
        num_parked: parked sessions.
        alone_ms: median step without parked sessions.
        beside_ms: median step with them.
    """

    num_parked: int
    alone_ms: float
    beside_ms: float

    @property
    def slowdown(self) -> float:
        return self.beside_ms / self.alone_ms - 1


def time_steps(
    engine: SteppedEngine, rows: Sequence[int], context_lens: Sequence[int], new_lens: Sequence[int]
) -> tuple[list[StepTimes], float]:
    """Measures every combination, in rounds: what else this machine does comes to all of them.

    Returns:
        The times; and bytes per second at which memory was read meanwhile, the median of the rounds.
    """
    sessions = range(1, max(rows) + 1)
    context_lens = sorted(context_lens)
    bandwidths: list[float] = []
    steps: dict[tuple[int, int, int], list[Step]] = {kind: [] for kind in product(context_lens, rows, new_lens)}
    with tqdm(total=_ROUNDS * len(steps), desc="steps", unit="kind", leave=False) as progress:
        for _ in range(_ROUNDS):
            bandwidths.append(read_bandwidth())
            for context_len in context_lens:
                engine.grow(sessions, context_len)
                for num_rows, num_new in product(rows, new_lens):
                    some = sessions[:num_rows]
                    if num_new == 1:
                        took = engine.decode(some, _NUM_DECODE_STEPS)
                    else:
                        took = engine.append(some, num_new, _NUM_APPEND_STEPS)
                    steps[context_len, num_rows, num_new] += took
                    progress.update()
    for session_id in sessions:
        engine.end(session_id)
    times = [
        summary(of_kind, num_rows, context_len, num_new, engine.bytes_per_token)
        for (context_len, num_rows, num_new), of_kind in steps.items()
    ]
    return times, median(bandwidths)


def summary(steps: Sequence[Step], num_rows: int, context_len: int, num_new: int, bytes_per_token: int) -> StepTimes:
    """Medians of each part separately, so that they add up only approximately."""
    step_s = median(step.step_s for step in steps)
    num_bytes = steps[0].parts.product_bytes + num_rows * context_len * bytes_per_token
    return StepTimes(
        num_rows=num_rows,
        context_len=context_len,
        num_new=num_new,
        step_ms=step_s * 1e3,
        products_ms=median(step.parts.products_s for step in steps) * 1e3,
        attention_ms=median(step.parts.attention_s for step in steps) * 1e3,
        layer_rest_ms=median(step.layer_rest_s for step in steps) * 1e3,
        around_ms=median(step.around_s for step in steps) * 1e3,
        tokens_per_s=num_rows * num_new / step_s,
        bytes_per_s=num_bytes / step_s,
    )


def slopes(times: Sequence[StepTimes], bytes_per_token: int, bandwidth: float) -> list[Slope]:
    """The slope for each number of sessions whose decode steps were measured at two or more contexts."""
    found = []
    for num_rows in sorted({step.num_rows for step in times}):
        decode = [step for step in times if step.num_rows == num_rows and step.num_new == 1]
        if len(decode) > 1:
            lens, times_us = [num_rows * step.context_len for step in decode], [step.step_ms * 1e3 for step in decode]
            growth = linear_regression(lens, times_us).slope
            found.append(Slope(num_rows, growth, bytes_per_token / bandwidth * 1e6))
    return found


def time_parked(engine: SteppedEngine, num_parked: int, context_len: int) -> Parked:
    """Decode steps of a few sessions, alone and beside parked ones, in alternating rounds."""
    talking, parked = range(1, _PARKED_ROWS + 1), range(_PARKED_ROWS + 1, _PARKED_ROWS + num_parked + 1)
    engine.grow(talking, context_len)
    alone, beside = [], []
    for _ in tqdm(range(_ROUNDS), desc=f"{num_parked} parked", unit="round", leave=False):
        alone += engine.decode(talking, _NUM_DECODE_STEPS)
        engine.grow(parked, _PARKED_LEN)
        beside += engine.decode(talking, _NUM_DECODE_STEPS)
        for session_id in parked:
            engine.end(session_id)
    return Parked(num_parked, *(median(step.step_s for step in steps) * 1e3 for steps in (alone, beside)))


def as_json(times: Sequence[StepTimes]) -> list[dict[str, float]]:
    """The times for a result file."""
    return [{name: round(value, 3) for name, value in asdict(step).items()} for step in times]
