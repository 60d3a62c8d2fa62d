"""An engine over a runner without a model, stepped by hand: what is left of a step is what the host does.

The runner lays out the page tables as a real one does, once for each pass, and returns logits that are there already.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
# The first tokens of 256 turns fit one pass.
_MAX_BATCH_TOKENS = 2048


class _NoModel:
    """A runner that computes nothing (see `microturn.model.runner.Runner`).

    Args:
        num_pages: of the pool.
        max_rows: that want logits in one pass.
        is_asynchronous: as a GPU's: the next step is launched before this one is committed.
    """

    accepts_embeds = True
    no_window_reason: str | None = None
    vocab_size = VOCAB_SIZE
    hidden_size = 1

    def __init__(self, num_pages: int, max_rows: int, *, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self.kv = KVTensors([LayerShape(1, 1)], num_pages, PAGE_SIZE, dtype=torch.float32)
        self._logits = torch.rand(max_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def run(self, batch: Batch) -> Tensor:
        PagedStep.plan(batch, PAGE_SIZE)
        return self._logits[: sum(row.wants_logits for row in batch.rows)]


class _MustSucceed:
    def put(self, output: TurnOutput) -> None: ...

    def fail(self, error: MicroturnError) -> None:
        raise error


class HostEngine:
    """Sessions of an engine without a model.

    Args:
        max_context: tokens of a session.
        max_rows: sessions that have a turn at once.
        max_waiting: sessions without one beside them, of few tokens.
        is_ahead: whether steps are launched ahead, as on a GPU.
    """

    def __init__(self, max_context: int, max_rows: int, max_waiting: int = 0, *, is_ahead: bool) -> None:
        num_pages = (max_rows * max_context + max_waiting * 2 * PAGE_SIZE) // PAGE_SIZE * 5 // 4
        settings = Settings(
            page_size=PAGE_SIZE,
            max_sessions=max_rows + max_waiting,
            max_batch_tokens=_MAX_BATCH_TOKENS,
            idle_timeout_s=3600.0,
        )
        self.engine = build_engine(
            settings,
            _NoModel(num_pages, max_rows, is_asynchronous=is_ahead),
            PagePool(num_pages, PAGE_SIZE),
            max_context=max_context,
            new_codec=lambda _tools: IdsOnly(),
        )

    def open(self, session_ids: Sequence[int], context_len: int) -> None:
        """Opens sessions of so many tokens."""
        for session_id in session_ids:
            ids = random.Random(session_id).choices(range(VOCAB_SIZE), k=context_len)
            self.engine.submit(self.turn(session_id, ids, {"max_tokens": 0}, start=True))
            self.run_out()

    def turn(self, session_id: int, ids: Sequence[int], options: dict[str, Any], *, start: bool = False) -> Turn:
        """A turn that must not fail; it has come now."""
        given = TokenInput(tuple(ids))
        return Turn(TurnRequest(session_id, given, _MustSucceed(), self.engine.clock(), start, options=options))

    def run_out(self) -> None:
        """Steps until nothing is left to compute."""
        while self.engine.step():
            pass
