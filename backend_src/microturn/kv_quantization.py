"""Numbers in 8 bits: each vector as whole multiples of a scale of its own, from -127 to 127.

Symmetric, rounded to nearest. A vector's code depends on that vector alone, so that a session's KV does not depend on
how its tokens were cut into turns. What a vector is, and where its code is kept, is the caller's knowledge.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_STEPS = 127

# Vectors of zeros have a scale too; smaller ones than this could not be divided by.
LEAST_SCALE = torch.finfo(torch.float32).tiny


def quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds float32 vectors [..., n] to multiples of 1/127 of their largest element.

    Returns:
        int8 [..., n] and float32 scales [...]. A vector that is not finite throughout has a scale that is not either.
    """
    scales = (vectors.abs().amax(-1) / MOST_STEPS).clamp_(min=LEAST_SCALE)
    return (vectors / scales[..., None]).round_().to(torch.int8), scales


def dequantize(steps: Tensor, scales: Tensor) -> Tensor:
    """The float32 vectors [..., n] that `quantize` rounded to: off by half a scale at most."""
    return steps.float() * scales[..., None]
