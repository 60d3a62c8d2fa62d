"""How a layer turns the products of queries and keys into weights of values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a layer; the weights are their softmax.

    Sink logits are not the sinks of a session's window, which are tokens: they are scores of a key that has no value
    and that all queries see, whatever their window. What it gets of a head's softmax, the other keys lack.

    Attributes:
        scale: factor of the products.
        window: positions visible to a query, itself included; None is all.
        soft_cap: scores come no further from 0 (see `soft_capped`); None leaves them as they are.
        sink_logits: float32 [heads], contiguous; None without.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sink_logits: Tensor | None = None


def soft_capped(x: Tensor, soft_cap: float | None) -> Tensor:
    """Numbers [...] that stay as they are near 0, and come no further from it than the cap, if there is one."""
    return x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
