"""How a layer turns the products of queries and keys into weights of values."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_capped(x: Tensor, soft_cap: float | None) -> Tensor:
    """Numbers [...] that stay as they are near 0, and come no further from it than the cap, if there is one."""
    return x if soft_cap is None else soft_cap * torch.tanh(x / soft_cap)
