"""Vectors in 8-bit floats (e4m3): numbers of that type, times a float32 scale for each block of neighbours.

The largest element of a block becomes the largest number. A vector's code depends on that vector alone, so that a
token's result does not depend on those beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max

# The minimum scale, so that blocks of zeros can be divided by it.
LEAST_SCALE = torch.finfo(torch.float32).tiny


def quantize(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Rounds vectors [rows, n] of any float type.

    Args:
        x: the vectors.
        block: elements with a scale in common; n is a multiple.

    Returns:
        Numbers [rows, n] and float32 scales [rows, n // block]. Elements that are not finite become NaN.
    """
    # By a tensor: by a number, torch on a GPU would multiply by its inverse, which rounds twice.
    largest = torch.full((), LARGEST, device=x.device)
    scales = (x.float().reshape(len(x), -1, block).abs().amax(-1) / largest).clamp(min=LEAST_SCALE)
    return encode(x, scales), scales


def encode(x: Tensor, scales: Tensor) -> Tensor:
    """The numbers [rows, n] that come nearest to vectors [rows, n], given scales [rows, blocks]."""
    numbers = x.float().reshape(*scales.shape, -1) / scales[..., None]
    return numbers.clamp(-LARGEST, LARGEST).to(DTYPE).flatten(1)


def decode(numbers: Tensor, scales: Tensor) -> Tensor:
    """The float32 vectors [rows, n] of numbers [rows, n] and scales [rows, blocks]."""
    return (numbers.float().reshape(*scales.shape, -1) * scales[..., None]).flatten(1)
