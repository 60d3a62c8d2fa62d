"""Products of 8-bit floats whose scales are of blocks, in the language of OpenAI's Triton compiler.

DeepSeek's layout: a block of neighbouring inputs has a scale for each row of the weight, and one for each token. The
sums of a block are scaled before they are added to those of the blocks before it, in float32. Torch has such products
for Hopper alone, and in blocks of 128 by 128.

A token's sums have the same order whatever the number of tokens: a program has `_ROWS` of them, padded, so that the
same instructions multiply. Few tokens wait for the weights, not for products; then programs are small, so that there
are enough to read from all of the memory at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Tokens of a program, and its outputs where one program has all tokens, or several.
_ROWS = 64
_FEW_OUTPUTS, _MANY_OUTPUTS = 32, 128

# Inputs of a block: instructions multiply 32, and a program holds a few blocks of weights in shared memory.
_BLOCKS = (32, 64, 128)


def covers(block: int) -> bool:
    """Whether the kernel computes products with blocks of so many inputs."""
    return block in _BLOCKS


def multiply(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Writes the product of x and a weight, and a bias, into out, and returns it; all are contiguous.

    Args:
        x: float8 [rows, in].
        x_scales: float32 [rows, blocks].
        weight: float8 [out, in].
        weight_scales: float32 [out, blocks].
        bias: [out], or None.
        out: [rows, out].
    """
    (num_rows, num_in), num_out, num_blocks = x.shape, len(weight), x_scales.shape[1]
    outputs = _FEW_OUTPUTS if num_rows <= _ROWS else _MANY_OUTPUTS
    _multiply[triton.cdiv(num_out, outputs), triton.cdiv(num_rows, _ROWS)](
        x,
        x_scales,
        weight,
        weight_scales,
        bias,
        out,
        num_rows,
        num_out,
        NUM_BLOCKS=num_blocks,
        BLOCK=num_in // num_blocks,
        ROWS=_ROWS,
        OUTPUTS=outputs,
        num_warps=4,
        num_stages=4,
    )
    return out


# The number of rows is any: a kernel for those that are multiples of 16 would be compiled while sessions wait.
@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor | None,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """See `multiply`; the grid is [groups of outputs, groups of rows], and tensors are pointers."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    has_output, has_row = output < num_out, row < num_rows
    num_in = NUM_BLOCKS * BLOCK
    at = tl.arange(0, BLOCK)
    of_x = x + row[:, None].to(tl.int64) * num_in + at[None, :]
    of_weight = weight + output[None, :].to(tl.int64) * num_in + at[:, None]
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for block in range(NUM_BLOCKS):
        x_scale = tl.load(x_scales + row * NUM_BLOCKS + block, has_row, other=0.0)
        weight_scale = tl.load(weight_scales + output * NUM_BLOCKS + block, has_output, other=0.0)
        given = tl.load(of_x + block * BLOCK, has_row[:, None], other=0.0)
        held = tl.load(of_weight + block * BLOCK, has_output[None, :], other=0.0)
        sums += tl.dot(given, held) * (x_scale[:, None] * weight_scale[None, :])
    if bias is not None:
        sums += tl.load(bias + output, has_output, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None].to(tl.int64) * num_out + output[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), has_row[:, None] & has_output[None, :])
