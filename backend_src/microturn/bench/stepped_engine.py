"""An engine in this process, stepped by hand, with contexts of any length that cost nothing to make.

Contexts are appended while a stand-in takes the place of the model; their KV is whatever the pages hold. That changes
no time: every page is memory that was written, and the kernels' work depends on no value.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microturn.batch import Batch
from microturn.bench.stopwatch import Stopwatch, TimedDecoder
from microturn.engine import Engine
from microturn.errors import InvalidArgument, MicroturnError
from microturn.kv_tensors import KVTensors
from microturn.layers.decoder import FusedDecoder
from microturn.runner import ModelRunner, Runner
from microturn.turn import TokenInput, Turn, TurnOutput, TurnRequest


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes:
        step_s: all of it.
        parts: where that went.
    """

    step_s: float
    parts: Stopwatch

    @property
    def layer_rest_s(self) -> float:
        """Of the layers what is neither product nor attention."""
        return self.parts.layers_s - self.parts.products_s - self.parts.attention_s

    @property
    def around_s(self) -> float:
        """Of the step what is not layers."""
        return self.step_s - self.parts.layers_s


class SteppedEngine:
    """An engine whose sessions do what a benchmark wants of them.

    Args:
        engine: just loaded; it is this benchmark's for good.

    Raises:
        InvalidArgument: when the model's layers are not ours, and cannot be timed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        if not isinstance(runner.decoder, FusedDecoder):
            raise InvalidArgument("this model runs on transformers' own layers, which have no stopwatch in them")
        self._stopwatch = Stopwatch()
        runner.decoder = TimedDecoder(runner.decoder, self._stopwatch)
        self._computes, self._stands_in = runner, _StandIn(runner)
        self._fill(runner.kv)
        self._context_lens: dict[int, int] = {}

    @property
    def bytes_per_token(self) -> int:
        """Of KV, over all layers."""
        return self._computes.kv.bytes_per_page // self._computes.kv.page_size

    def grow(self, session_id: int, context_len: int) -> None:
        """Opens a session or appends to it, without computing, until it has so many tokens."""
        at = self._context_lens.get(session_id, 0)
        self._engine.runner = self._stands_in
        given = [token_at(position) for position in range(at, context_len)]
        self._submit(session_id, given, {"max_tokens": 0, "rewind_to": at} if at else {"max_tokens": 0}, start=at == 0)
        self._run_out()
        self._engine.runner = self._computes
        self._context_lens[session_id] = context_len

    def end(self, session_id: int) -> None:
        """Closes a session."""
        self._submit(session_id, [], {"max_tokens": 0}, end=True)
        self._run_out()
        del self._context_lens[session_id]

    def decode(self, session_ids: Sequence[int], num_steps: int) -> list[Step]:
        """Steps in which each session computes one token; their contexts are cut back afterwards."""
        self._turns(session_ids, num_given=1, num_output=num_steps + 1)
        self._step()  # brings the input
        return [self._step_of(len(session_ids)) for _ in range(num_steps)]

    def append(self, session_ids: Sequence[int], num_tokens: int, num_steps: int) -> list[Step]:
        """Steps in which each session computes so many tokens, at the same context each time."""
        steps = []
        for _ in range(num_steps):
            # The last token of a context is computed with what comes next.
            self._turns(session_ids, num_given=num_tokens - 1, num_output=1)
            steps.append(self._step_of(num_tokens * len(session_ids)))
        return steps

    def _turns(self, session_ids: Sequence[int], num_given: int, num_output: int) -> None:
        for session_id in session_ids:
            at = self._context_lens[session_id]
            given = [token_at(at + offset) for offset in range(num_given)]
            self._submit(session_id, given, {"max_tokens": num_output, "ignore_eos": True, "rewind_to": at})

    def _submit(
        self,
        session_id: int,
        given: Sequence[int],
        options: Mapping[str, Any],
        *,
        start: bool = False,
        end: bool = False,
    ) -> None:
        request = TurnRequest(
            session_id, TokenInput(tuple(given)), _Raising(), self._engine.clock(), start, end, options
        )
        self._engine.submit(Turn(request))

    def _run_out(self) -> None:
        while self._engine.step():
            pass

    def _step_of(self, num_tokens: int) -> Step:
        step = self._step()
        if step.parts.num_tokens != num_tokens:
            raise RuntimeError(f"a step of {step.parts.num_tokens} tokens where {num_tokens} were to be measured")
        return step

    def _step(self) -> Step:
        vars(self._stopwatch).update(vars(Stopwatch()))
        started_s = time.perf_counter()
        self._engine.step()
        parts = Stopwatch(**vars(self._stopwatch))
        return Step(time.perf_counter() - started_s - parts.products_s, parts)

    @staticmethod
    def _fill(kv: KVTensors) -> None:
        """Memory that was never written is one page of zeros, and is read as fast as a cache."""
        for layer in kv.layers:
            for tensor in layer.tensors:
                page = torch.randint(-100, 100, tensor.shape[1:])
                tensor.copy_(page.to(tensor.dtype) if tensor.dtype == torch.int8 else page / 100)


def token_at(position: int) -> int:
    """Some token that every vocabulary has."""
    return 10 + position % 100


class _Raising:
    """A sink for what must not fail."""

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
        return torch.zeros(sum(row.wants_logits for row in batch.rows), self.vocab_size)
