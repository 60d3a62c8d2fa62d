"""8-bit quantization: each vector as integers from -127 to 127 times its own scale, or as floats times a layer's.

Symmetric, rounded to nearest. A vector's code depends on that vector alone, so that a session's KV does not depend on
how its tokens were divided into turns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_STEPS = 127

# The minimum scale, so that vectors of zeros can be divided by it.
LEAST_SCALE = torch.finfo(torch.float32).tiny


class LayerScales(NamedTuple):
    """What a layer's keys, and its values, are divided by before they become 8-bit floats (e4m3)."""

    keys: float = 1.0
    values: float = 1.0


UNSCALED = LayerScales()


def quantize(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds float32 vectors [..., n] to multiples of 1/127 of their largest element.

    Returns:
        int8 [..., n] and float32 scales [...]. The scale of a vector with a non-finite element is not finite.
    """
    scales = (vectors.abs().amax(-1) / MOST_STEPS).clamp_(min=LEAST_SCALE)
    return (vectors / scales[..., None]).round_().to(torch.int8), scales


def dequantize(steps: Tensor, scales: Tensor) -> Tensor:
    """The float32 vectors [..., n] that `quantize` rounded to: off by half a scale at most."""
    return steps.float() * scales[..., None]
