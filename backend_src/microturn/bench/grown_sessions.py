"""Sessions of an engine that is stepped by hand, with contexts of any length that cost nothing to make.

Contexts are appended while a stand-in takes the place of the model; their KV is whatever the pages hold. That changes
no time: every page is memory that was written, and the kernels' work depends on no value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from microturn.batch import Batch
from microturn.engine import Engine
from microturn.errors import MicroturnError
from microturn.kv_tensors import KVTensors
from microturn.runner import Runner
from microturn.turn import TokenInput, Turn, TurnOutput, TurnRequest, TurnSink

# Sessions that grow together: what a step costs besides its tokens grows with their number.
_AT_ONCE = 8


class GrownSessions:
    """An engine's sessions, named by number.

    Args:
        engine: just loaded; it is this benchmark's for good.

    Attributes:
        engine: what serves them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._computes, self._stands_in = engine.runner, _StandIn(engine.runner)
        self._context_lens: dict[int, int] = {}
        _fill(engine.runner.kv)

    @property
    def bytes_per_token(self) -> int:
        """Of KV, over all layers."""
        kv = self._computes.kv
        return kv.groups.num_groups * kv.bytes_per_page // kv.page_size

    def grow(self, session_ids: Sequence[int], context_len: int) -> None:
        """Opens sessions, appends to them without computing, or cuts them back, until each has so many tokens."""
        self.engine.runner = self._stands_in
        learnt = vars(self.engine._pace).copy()
        for some in (session_ids[first : first + _AT_ONCE] for first in range(0, len(session_ids), _AT_ONCE)):
            for session_id in some:
                at = self._context_lens.get(session_id)
                first = 0 if at is None else min(at, context_len)
                options = {"max_tokens": 0} if at is None else {"max_tokens": 0, "rewind_to": first}
                self.submit(session_id, MustSucceed(), context_len - first, options, start=at is None)
                self._context_lens[session_id] = context_len
            self.run_out()
        self.engine.runner = self._computes
        vars(self.engine._pace).update(learnt)  # passes of the stand-in say nothing about those of the model

    def end(self, session_id: int) -> None:
        """Closes a session."""
        self.submit(session_id, MustSucceed(), 0, {"max_tokens": 0}, end=True)
        self.run_out()
        del self._context_lens[session_id]

    def end_all(self) -> None:
        """Closes all of them."""
        for session_id in list(self._context_lens):
            self.end(session_id)

    def submit(
        self,
        session_id: int,
        sink: TurnSink,
        num_given: int,
        options: Mapping[str, Any],
        *,
        start: bool = False,
        end: bool = False,
    ) -> None:
        """Posts a turn of so many tokens."""
        given = tuple(token_at(place) for place in range(num_given))
        request = TurnRequest(session_id, TokenInput(given), sink, self.engine.clock(), start, end, options)
        self.engine.submit(Turn(request))

    def submit_from(self, session_id: int, sink: TurnSink, num_given: int, num_output: int) -> None:
        """Posts a turn from the end of the context that a session has grown to, whatever it has appended since."""
        at = self._context_lens[session_id]
        self.submit(session_id, sink, num_given, {"max_tokens": num_output, "ignore_eos": True, "rewind_to": at})

    def run_out(self) -> None:
        """Steps until nothing is left to compute."""
        while self.engine.step():
            pass


def _fill(kv: KVTensors) -> None:
    """Memory that was never written is one page of zeros, and is read as fast as a cache."""
    for layer in kv.layers:
        for tensor in layer.tensors:
            page = torch.randint(-100, 100, tensor.shape[1:])
            page = (page if tensor.dtype == torch.int8 else page / 100).to(tensor.dtype)
            # As bytes: not every type can be copied everywhere.
            tensor.view(torch.uint8).copy_(page.view(torch.uint8).to(tensor.device))


def token_at(place: int) -> int:
    """Some token that every vocabulary has."""
    return 10 + place % 100


class MustSucceed:
    """A sink for what must not fail, and whose answer nobody reads."""

    def put(self, output: TurnOutput) -> None:
        pass

    def fail(self, error: MicroturnError) -> None:
        raise error


class _StandIn:
    """A runner that computes nothing (see `Runner`)."""

    is_asynchronous = False

    def __init__(self, runner: Runner) -> None:
        self.vocab_size = runner.vocab_size
        self.hidden_size = runner.hidden_size
        self.accepts_embeds = runner.accepts_embeds
        self.no_window_reason = runner.no_window_reason
        self.kv = runner.kv

    def run(self, batch: Batch) -> Tensor:
        return torch.zeros(sum(row.wants_logits for row in batch.rows), self.vocab_size, device=self.kv.device)
