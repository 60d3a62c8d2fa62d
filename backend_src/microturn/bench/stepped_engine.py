"""An engine in this process whose steps and their parts are timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from microturn.bench.grown_sessions import GrownSessions, MustSucceed
from microturn.bench.stopwatch import Stopwatch, TimedDecoder
from microturn.engine.engine import Engine
from microturn.errors import InvalidArgument
from microturn.model.cpu.layers import FusedLayers
from microturn.model.runner import ModelRunner


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes:
        step_s: of the whole step.
        parts: times of its parts.
    """

    step_s: float
    parts: Stopwatch

    @property
    def layer_rest_s(self) -> float:
        """Time of the layers without products and attention."""
        return self.parts.layers_s - self.parts.products_s - self.parts.attention_s

    @property
    def around_s(self) -> float:
        """Time of the step without the layers."""
        return self.step_s - self.parts.layers_s


class SteppedEngine(GrownSessions):
    """An engine with sessions for benchmarks of single steps.

    Args:
        engine: just loaded; it is this benchmark's for good.

    Raises:
        InvalidArgument: the model's layers are transformers' own, which cannot be timed; or see `GrownSessions`.
    """

    def __init__(self, engine: Engine) -> None:
        runner = engine.runner
        assert isinstance(runner, ModelRunner)
        if not isinstance(runner.decoder, FusedLayers):
            raise InvalidArgument("this model runs on transformers' own layers, which have no stopwatch in them")
        self._stopwatch = Stopwatch()
        runner.decoder = TimedDecoder(runner.decoder, self._stopwatch)
        super().__init__(engine)

    def decode(self, session_ids: Sequence[int], num_steps: int) -> list[Step]:
        """Runs steps in which each session computes one token, then cuts the contexts back."""
        self._turns(session_ids, num_given=1, num_output=num_steps + 1)
        self._step()  # brings the input
        return [self._step_of(len(session_ids)) for _ in range(num_steps)]

    def append(self, session_ids: Sequence[int], num_tokens: int, num_steps: int) -> list[Step]:
        """Runs steps in which each session computes `num_tokens` tokens, at the same context each time."""
        steps = []
        for _ in range(num_steps):
            # The last token of a context is computed with what comes next.
            self._turns(session_ids, num_given=num_tokens - 1, num_output=1)
            steps.append(self._step_of(num_tokens * len(session_ids)))
        return steps

    def _turns(self, session_ids: Sequence[int], num_given: int, num_output: int) -> None:
        for session_id in session_ids:
            self.submit_from(session_id, MustSucceed(), num_given, num_output)

    def _step_of(self, num_tokens: int) -> Step:
        step = self._step()
        if step.parts.num_tokens != num_tokens:
            raise RuntimeError(f"a step of {step.parts.num_tokens} tokens where {num_tokens} were to be measured")
        return step

    def _step(self) -> Step:
        vars(self._stopwatch).update(vars(Stopwatch()))
        started_s = time.perf_counter()
        self.engine.step()
        parts = Stopwatch(**vars(self._stopwatch))
        return Step(time.perf_counter() - started_s - parts.products_s - parts.attention_s, parts)
