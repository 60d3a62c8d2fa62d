"""Sessions of an engine that is stepped by the benchmark, with contexts of any length that are not computed.

Contexts are appended while a stub replaces the model; their KV is whatever the pages contain. That does not change
times: all pages have been written, and the kernels' work does not depend on values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from microturn.engine.engine import Engine
from microturn.errors import InvalidArgument, MicroturnError
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch
from microturn.model.parallel.runners import LeadingRunner
from microturn.model.runner import Runner
from microturn.sessions.inputs import TokenInput
from microturn.sessions.turn import Turn, TurnOutput, TurnRequest, TurnSink

# Sessions that grow together: the cost of a step besides its tokens grows with their number.
_AT_ONCE = 8


class GrownSessions:
    """An engine's sessions, named by number.

    Args:
        engine: just loaded, used only by this benchmark.

    Attributes:
        engine: of the sessions.

    Raises:
        InvalidArgument: other processes have a part of the pages, which would stay unwritten.
    """

    def __init__(self, engine: Engine) -> None:
        if isinstance(engine.runner, LeadingRunner):
            raise InvalidArgument("steps are measured in one process: setting 'tensor_parallel' is 1 here")
        self.engine = engine
        self._computes, self._stands_in = engine.runner, _StandIn(engine.runner)
        self._context_lens: dict[int, int] = {}
        _fill(engine.runner.kv)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token over all layers."""
        kv = self._computes.kv
        return kv.groups.num_groups * kv.bytes_per_page // kv.page_size

    def grow(self, session_ids: Sequence[int], context_len: int) -> None:
        """Opens sessions, and appends without computing or cuts back until each has `context_len` tokens."""
        self.engine.steps.runner = self._stands_in
        learnt = vars(self.engine.steps.step_time).copy()
        for some in (session_ids[first : first + _AT_ONCE] for first in range(0, len(session_ids), _AT_ONCE)):
            for session_id in some:
                at = self._context_lens.get(session_id)
                first = 0 if at is None else min(at, context_len)
                options = {"max_tokens": 0} if at is None else {"max_tokens": 0, "rewind_to": first}
                self.submit(session_id, MustSucceed(), context_len - first, options, start=at is None)
                self._context_lens[session_id] = context_len
            self.run_out()
        self.engine.steps.runner = self._computes
        vars(self.engine.steps.step_time).update(learnt)  # restores what was learnt before the stub ran

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
        """Posts a turn of `num_given` tokens."""
        given = tuple(token_at(place) for place in range(num_given))
        request = TurnRequest(session_id, TokenInput(given), sink, self.engine.clock(), start, end, options)
        self.engine.submit(Turn(request))

    def submit_from(self, session_id: int, sink: TurnSink, num_given: int, num_output: int, **sampling: float) -> None:
        """Posts a turn from the end of the context that a session has grown to, cutting back later tokens."""
        at = self._context_lens[session_id]
        options = {"max_tokens": num_output, "ignore_eos": True, "rewind_to": at, **sampling}
        self.submit(session_id, sink, num_given, options)

    def run_out(self) -> None:
        """Runs steps until nothing is left to compute."""
        while self.engine.step():
            pass


def _fill(kv: KVTensors) -> None:
    """Writes all pages: unwritten memory maps to one page of zeros, which is read at cache speed.

    Floats are positive: those of pages in 8 bits are scales, and with others weights would overflow or be subnormal.
    """
    for layer in kv.layers:
        for tensor in layer.tensors:
            page = torch.randint(-100, 100, tensor.shape[1:])
            page = (page if tensor.dtype == torch.int8 else (page + 101) / 200).to(tensor.dtype)
            # As bytes: not every device can copy every type.
            tensor.view(torch.uint8).copy_(page.view(torch.uint8).to(tensor.device))


def token_at(place: int) -> int:
    """A token id that every vocabulary has."""
    return 10 + place % 100


class MustSucceed:
    """A sink that ignores the answer and raises errors."""

    def put(self, output: TurnOutput) -> None:
        pass

    def fail(self, error: MicroturnError) -> None:
        raise error


class _StandIn:
    """A `Runner` that computes nothing."""

    is_asynchronous = False

    def __init__(self, runner: Runner) -> None:
        self.vocab_size = runner.vocab_size
        self.hidden_size = runner.hidden_size
        self.accepts_embeds = runner.accepts_embeds
        self.no_window_reason = runner.no_window_reason
        self.kv = runner.kv

    def run(self, batch: Batch) -> Tensor:
        return torch.zeros(sum(row.wants_logits for row in batch.rows), self.vocab_size, device=self.kv.device)
