"""The attention of a step, as layers use it: `PagedAttention`, FlashInfer's, or what stands for one in a check."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from microturn.model.scores import Scores


class Attention(Protocol):
    """The attention as a layer uses it (see `PagedAttention`)."""

    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor: ...
