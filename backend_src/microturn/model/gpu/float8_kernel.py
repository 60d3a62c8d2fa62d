"""One kernel that rounds vectors to 8-bit floats, in the language of OpenAI's Triton compiler.

What `float8.quantize` computes, to the bit, in one launch in place of six: every product of 8-bit floats is preceded by
it. A program has the elements of a vector that share a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from microturn.model.gpu import float8

_ELEMENTS_OF_THREAD = 32
_MOST_WARPS = 16


def quantize(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `float8.quantize`; x is contiguous."""
    num_rows, num_in = x.shape
    numbers = torch.empty_like(x, dtype=float8.DTYPE)
    scales = x.new_empty(num_rows, num_in // block, dtype=torch.float32)
    size = triton.next_power_of_2(block)
    num_warps = min(_MOST_WARPS, max(1, size // _ELEMENTS_OF_THREAD // 32))
    _quantize[scales.shape](
        x, numbers, scales, block, float8.LARGEST, float8.LEAST_SCALE, SIZE=size, num_warps=num_warps
    )
    return numbers, scales


@triton.jit
def _quantize(
    x: tl.tensor,
    numbers: tl.tensor,
    scales: tl.tensor,
    block: tl.tensor,
    largest: tl.tensor,
    least_scale: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """See `quantize`; the grid is [rows, blocks of a row], and `SIZE` a power of two that holds a block."""
    number = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    at = tl.arange(0, SIZE)
    is_given = at < block
    given = tl.load(x + number * block + at, is_given, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(given)), largest), least_scale)
    rounded = tl.clamp(tl.div_rn(given, scale), -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    tl.store(numbers + number * block + at, rounded.to(numbers.dtype.element_ty), is_given)
    tl.store(scales + number, scale)
