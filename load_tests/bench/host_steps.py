"""Host time of decode steps, and of turns on the beat, over a runner without a model (see `host_engine`).

Runs as a program of its own, so that `host_time` can run that of an earlier revision beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from load_tests.bench.host_beat import measure_beat
from load_tests.bench.host_engine import HostEngine

WAITING_LEN = 16
NUM_WARM_UP_STEPS, NUM_STEPS = 5, 40
# So many kinds of steps are measured with the same sessions.
_MOST_KINDS = 16
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}


@dataclass(frozen=True)
class HostTime:
    """Steps of one kind.

    Attributes:
        context_len: tokens of each session in the step.
        num_rows: these sessions; each computes a token.
        num_waiting: sessions without a turn beside them.
        has_penalties: whether the turns ask for penalties.
        is_ahead: whether each step is launched before the one before it is committed, as on a GPU.
        step_ms: median; processor time of the engine's thread, so that what else runs on the machine counts little.
    """

    context_len: int
    num_rows: int
    num_waiting: int
    has_penalties: bool
    is_ahead: bool
    step_ms: float


def measure(context_lens: Sequence[int], nums_rows: Sequence[int], nums_waiting: Sequence[int]) -> list[HostTime]:
    """Every combination, with and without penalties; and plain steps ahead without sessions that wait."""
    found = []
    for context_len in context_lens:
        found += _measure(context_len, nums_rows, nums_waiting, (False, True), is_ahead=False)
        found += _measure(context_len, nums_rows, [0], (False,), is_ahead=True)
    return found


def _measure(
    context_len: int, nums_rows: Sequence[int], nums_waiting: Sequence[int], kinds: Sequence[bool], *, is_ahead: bool
) -> list[HostTime]:
    max_rows = max(nums_rows)
    max_context = context_len + 2 * (NUM_WARM_UP_STEPS + NUM_STEPS) * _MOST_KINDS
    host = HostEngine(max_context, max_rows, max(nums_waiting), is_ahead=is_ahead)
    host.open(range(1, max_rows + 1), context_len)
    num_open, found = 0, []
    for num_waiting in sorted(nums_waiting):
        host.open(range(max_rows + 1 + num_open, max_rows + 1 + num_waiting), WAITING_LEN)
        num_open = num_waiting
        for num_rows in nums_rows:
            for has_penalties in kinds:
                step_ms = _decode_ms(host, range(1, num_rows + 1), PENALTIES if has_penalties else {})
                found.append(HostTime(context_len, num_rows, num_waiting, has_penalties, is_ahead, step_ms))
    return found


def _decode_ms(host: HostEngine, session_ids: Sequence[int], options: dict[str, Any]) -> float:
    """Median of steps in which each session computes a token."""
    num_steps = NUM_WARM_UP_STEPS + NUM_STEPS
    for session_id in session_ids:
        asked = {"max_tokens": num_steps + 1, "ignore_eos": True, **options}
        host.engine.submit(host.turn(session_id, [1], asked))
    host.engine.step()  # brings the inputs
    times_ms = []
    for _ in range(num_steps):
        begun_s = time.thread_time()
        host.engine.step()
        times_ms.append((time.thread_time() - begun_s) * 1e3)
    if host.engine.step():
        raise RuntimeError("turns go on behind the steps that were measured")
    return median(times_ms[NUM_WARM_UP_STEPS:])


def main() -> None:
    """Measures and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("contexts", "rows", "waiting", "beat"):
        parser.add_argument(f"--{name}", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    steps = measure(arguments.contexts, arguments.rows, arguments.waiting)
    beats = [measure_beat(num_sessions) for num_sessions in arguments.beat]
    print(json.dumps({"steps": list(map(asdict, steps)), "beat": list(map(asdict, beats))}))


if __name__ == "__main__":
    main()
