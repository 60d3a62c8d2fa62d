"""Host time of decode steps over a runner without a model: what schedule, page tables, choice and commit take.

Runs as a program of its own, so that `host_time` can run that of an earlier revision beside it. The runner lays out the
page tables as a real one does, once for each pass, and returns logits that are there already.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from load_tests.bench.gpu.ids_only import IdsOnly
from microturn.engine.wiring import build_engine
from microturn.errors import MicroturnError
from microturn.kv.layer_groups import LayerShape
from microturn.kv.pool import PagePool
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch
from microturn.model.paged_step import PagedStep
from microturn.sessions.inputs import TokenInput
from microturn.sessions.turn import Turn, TurnOutput, TurnRequest
from microturn.settings import Settings

VOCAB_SIZE = 4096
PAGE_SIZE = 16
WAITING_LEN = 16
NUM_WARM_UP_STEPS, NUM_STEPS = 5, 40
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}


@dataclass(frozen=True)
class HostTime:
    """Steps of one kind.

    Attributes:
        context_len: tokens of each session in the step.
        num_rows: these sessions; each computes a token.
        num_waiting: sessions without a turn beside them.
        has_penalties: whether the turns ask for penalties.
        step_ms: median; processor time of the engine's thread, so that what else runs on the machine counts little.
    """

    context_len: int
    num_rows: int
    num_waiting: int
    has_penalties: bool
    step_ms: float


class _NoModel:
    """A runner that computes nothing (see `microturn.model.runner.Runner`)."""

    is_asynchronous = False
    accepts_embeds = True
    no_window_reason: str | None = None
    vocab_size = VOCAB_SIZE
    hidden_size = 1

    def __init__(self, num_pages: int, max_rows: int) -> None:
        self.kv = KVTensors([LayerShape(1, 1)], num_pages, PAGE_SIZE, dtype=torch.float32)
        self._logits = torch.rand(max_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def run(self, batch: Batch) -> Tensor:
        PagedStep.plan(batch, PAGE_SIZE)
        return self._logits[: sum(row.wants_logits for row in batch.rows)]


class _MustSucceed:
    def put(self, output: TurnOutput) -> None: ...

    def fail(self, error: MicroturnError) -> None:
        raise error


class _Sessions:
    """An engine that is stepped by hand."""

    def __init__(self, context_len: int, max_rows: int, max_waiting: int) -> None:
        max_context = context_len + 2 * (NUM_WARM_UP_STEPS + NUM_STEPS) * 10
        num_pages = (max_rows * max_context + max_waiting * 2 * WAITING_LEN) // PAGE_SIZE * 5 // 4
        self.engine = build_engine(
            Settings(page_size=PAGE_SIZE, max_sessions=max_rows + max_waiting, idle_timeout_s=3600.0),
            _NoModel(num_pages, max_rows),
            PagePool(num_pages, PAGE_SIZE),
            max_context=max_context,
            new_codec=lambda _tools: IdsOnly(),
        )

    def open(self, session_ids: Sequence[int], context_len: int) -> None:
        for session_id in session_ids:
            ids = random.Random(session_id).choices(range(VOCAB_SIZE), k=context_len)
            self._post(session_id, ids, {"max_tokens": 0}, start=True)
            self._run_out()

    def decode_ms(self, session_ids: Sequence[int], options: dict[str, Any]) -> float:
        """Median of steps in which each session computes a token."""
        num_steps = NUM_WARM_UP_STEPS + NUM_STEPS
        for session_id in session_ids:
            self._post(session_id, [1], {"max_tokens": num_steps + 1, "ignore_eos": True, **options})
        self.engine.step()  # brings the inputs
        times_ms = []
        for _ in range(num_steps):
            begun_s = time.thread_time()
            self.engine.step()
            times_ms.append((time.thread_time() - begun_s) * 1e3)
        if self.engine.step():
            raise RuntimeError("turns go on behind the steps that were measured")
        return median(times_ms[NUM_WARM_UP_STEPS:])

    def _post(self, session_id: int, ids: Sequence[int], options: dict[str, Any], *, start: bool = False) -> None:
        request = TurnRequest(
            session_id, TokenInput(tuple(ids)), _MustSucceed(), self.engine.clock(), start, options=options
        )
        self.engine.submit(Turn(request))

    def _run_out(self) -> None:
        while self.engine.step():
            pass


def measure(context_lens: Sequence[int], nums_rows: Sequence[int], nums_waiting: Sequence[int]) -> list[HostTime]:
    """Every combination, with and without penalties."""
    found = []
    for context_len in context_lens:
        sessions = _Sessions(context_len, max(nums_rows), max(nums_waiting))
        sessions.open(range(1, max(nums_rows) + 1), context_len)
        num_open = 0
        for num_waiting in sorted(nums_waiting):
            first = max(nums_rows) + 1
            sessions.open(range(first + num_open, first + num_waiting), WAITING_LEN)
            num_open = num_waiting
            for num_rows in nums_rows:
                for has_penalties in (False, True):
                    step_ms = sessions.decode_ms(range(1, num_rows + 1), PENALTIES if has_penalties else {})
                    found.append(HostTime(context_len, num_rows, num_waiting, has_penalties, step_ms))
    return found


def main() -> None:
    """Measures and prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("contexts", "rows", "waiting"):
        parser.add_argument(f"--{name}", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps([asdict(row) for row in measure(arguments.contexts, arguments.rows, arguments.waiting)]))


if __name__ == "__main__":
    main()
