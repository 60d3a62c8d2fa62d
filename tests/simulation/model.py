"""The model that is a hash, with passes that take time and that may fail."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from torch import Tensor

from microturn.model.batch import Batch
from support.fake_runner import FakeRunner


class TimedRunner(FakeRunner):
    """A model whose passes take virtual time.

    Args:
        spend: time passes, so many seconds.
        random: of how long passes take.
        pass_s: what a pass takes at least.
        token_s: and for each token.
    """

    def __init__(
        self, *, spend: Callable[[float], None], random: Random, pass_s: float, token_s: float, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._spend = spend
        self._random = random
        self._pass_s = pass_s
        self._token_s = token_s
        self.slowness = 1.0

    def run(self, batch: Batch) -> Tensor:
        self._spend((self._pass_s + batch.num_tokens * self._token_s) * self._random.uniform(0.9, 1.2) * self.slowness)
        logits = super().run(batch)
        self.batches.clear()
        return logits
