"""Matrix products with 8-bit weights: a quarter of the memory.

Each row of a weight has a scale, and so has each row of the input, which is rounded to 8 bits too: a token's result
depends on that token only. Both are rotated before they are rounded, otherwise 8 bits cost SmolLM2-135M 4 % of
perplexity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from microturn.model.cpu import amx_kernels, amx_products, int8_kernels, rotation, weight_memory
from microturn.model.cpu.int8_kernels import FEW_ROWS
from microturn.model.cpu.int8_products import MOST_WIDTH, PANEL, StepType, empty_panels
from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.stored_weight import as_stored
from microturn.model.products import stacked_biases

_Array = NDArray[Any]

# A weight for kernels: its panels, their scales, and a bias, which may be empty.
Int8Weight = tuple[_Array, _Array, _Array]


@kernel()
def multiply(x: _Array, weight: Int8Weight, out: _Array, num_threads: int | None) -> None:
    """Product of rows with a weight and its bias; all arrays are contiguous.

    Args:
        x: float32 [rows, in].
        weight: of an `Int8Linear`.
        out: float32 [rows, out], written.
        num_threads: threads that share the AMX tiles; None without AMX: then no code for it is generated (see
            `amx_threads`).
    """
    panels, scales, bias = weight
    num_rows = x.shape[0]
    num_padded = num_rows + -num_rows % amx_products.TILE_ROWS
    steps = np.empty((num_padded, panels.shape[1] // PANEL), StepType)
    x_scales, x_offsets = np.empty(num_rows, np.float32), np.empty(num_rows, np.int32)
    int8_kernels.quantize(x, steps, x_scales, x_offsets)
    # Few rows are limited by reading weights in either case, and plain vectors read them more steadily.
    if num_threads is None:
        int8_kernels.multiply(steps, x_scales, x_offsets, panels, scales, out)
    elif num_rows > FEW_ROWS:
        amx_kernels.multiply(steps, x_scales, x_offsets, panels, scales, out, num_threads)
    else:
        int8_kernels.multiply(steps, x_scales, x_offsets, panels, scales, out)
    if bias.shape[0] > 0:
        for row in range(num_rows):
            for d in range(out.shape[1]):
                out[row, d] += bias[d]


def amx_threads() -> int | None:
    """Number of threads that share the AMX tiles of a product; None on a CPU without AMX."""
    return numba.get_num_threads() if amx_products.is_available() else None


class Int8Linear:
    """A `Product` over its own copies of a weight, rounded to 8 bits, and of its bias.

    Attributes:
        weight: for kernels.

    Args:
        weight: [out, in], of any float type.
        bias: float32 [out], or None.
        others: weights of further outputs.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, others: Sequence[Tensor] = ()) -> None:
        weights = (weight, *others)
        self.num_out, num_in = sum(map(len, weights)), weight.shape[1]
        assert num_in <= MOST_WIDTH
        panels = empty_panels(self.num_out, num_in)
        scales = weight_memory.zeros((len(panels) * PANEL * 4,)).view(np.float32)
        scales[:] = 1
        begin = 0
        for part in weights:
            int8_kernels.round_weight(part.float().contiguous().numpy(), begin, panels, scales)
            begin += len(part)
        scales[: self.num_out] /= rotation.block_of(num_in)  # the rotation of the inputs and this one, together
        biases = np.empty(0, np.float32) if bias is None else bias.numpy().copy()
        self.weight: Int8Weight = (panels.reshape(len(panels), -1), scales, biases)
        self.num_bytes = panels.nbytes + scales.nbytes

    @classmethod
    def fused(cls, modules: Sequence[nn.Linear]) -> Self:
        """Rounds the weights of several modules, which are not changed."""
        weight, *others = (as_stored(module.weight) for module in modules)
        return cls(weight, stacked_biases(modules), others)

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        """Rounds the weight of one module, which is not changed."""
        return cls.fused([module])

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`."""
        multiply(x.numpy(), self.weight, out.numpy(), amx_threads())
        return out
