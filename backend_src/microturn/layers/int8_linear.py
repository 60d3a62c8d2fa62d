"""Matrix products over weights of 8 bits: a quarter of the memory, two kernels, one result.

Each row of a weight has a scale, and so has each row of the input: a token's result depends on nothing but that token.
Inputs keep 16 bits (8 cost SmolLM2-135M 3.9 % of perplexity). Both kernels add integers: they agree to the bit.

One layer of SmolLM2-135M (2 shared cores, AVX-512 with VNNI and AMX), ms by ours and by oneDNN's: 1 row 0.10 and 0.39,
16 rows 0.38 and 0.54, 32 rows 0.75 and 0.73, 256 rows 5.4 and 2.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from microturn.kv_quantization import quantize
from microturn.layers import int8_kernels
from microturn.layers.int8_products import HAS_VNNI, STEP, WEIGHT_ROWS, most_steps
from microturn.layers.linear import stacked

# Beyond so many rows oneDNN's kernel is the faster one. Without VNNI its sums of 16 bits saturate: ours takes all rows.
FEW_ROWS = 32


class Int8Linear:
    """A `Product` over a weight of its own, rounded to 8 bits.

    Args:
        weight: float32 [out, in].
        bias: float32 [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_out, num_in = weight.shape
        steps, scales = quantize(weight)
        num_rows = -(-self.num_out // WEIGHT_ROWS) * WEIGHT_ROWS
        width = -(-num_in // STEP) * STEP
        padded = torch.zeros(num_rows, width, dtype=torch.int8)
        padded[: self.num_out, :num_in] = steps
        self._weight = padded.numpy()
        self._scales = np.ones(num_rows, np.float32)
        self._scales[: self.num_out] = scales.numpy()
        self._most_steps = most_steps(num_in)
        self._transposed = padded[: self.num_out].t()
        self._bias = bias
        self.num_bytes = self._weight.nbytes + self._scales.nbytes

    @classmethod
    def fused(cls, modules: Sequence[nn.Linear]) -> Self:
        """Rounds the weights of several modules, which stay as they are."""
        return cls(*stacked(modules))

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        """Rounds the weight of one module, which stays as it is."""
        return cls(module.weight.detach(), None if module.bias is None else module.bias.detach())

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`."""
        if len(x) <= FEW_ROWS or not HAS_VNNI:
            int8_kernels.round_and_multiply(x.numpy(), self._most_steps, self._weight, self._scales, out.numpy())
        else:
            self._multiply_many(x, out)
        return out if self._bias is None else out.add_(self._bias)

    def _multiply_many(self, x: Tensor, out: Tensor) -> None:
        """Both bytes of the inputs as twice as many rows: bytes are what oneDNN multiplies."""
        scales = np.empty(len(x), np.float32)
        steps = torch.empty(2, len(x), self._weight.shape[1], dtype=torch.int8)
        int8_kernels.quantize_to_bytes(x.numpy(), self._most_steps, steps.numpy(), scales)
        sums = torch._int_mm(steps.flatten(0, 1), self._transposed).view(2, len(x), self.num_out)
        int8_kernels.scale_sums(sums.numpy(), scales, self._scales, out.numpy())
