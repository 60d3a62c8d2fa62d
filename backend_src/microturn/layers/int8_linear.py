"""Matrix products over weights of 8 bits: a quarter of the memory.

Each row of a weight has a scale, and so has each row of the input: a token's result depends on nothing but that token.
Inputs keep 16 bits (8 cost SmolLM2-135M 3.9 % of perplexity).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numba
from torch import Tensor, nn
from torch.nn.functional import pad

from microturn.kv_quantization import quantize
from microturn.layers import amx_kernels, amx_products, int8_kernels
from microturn.layers.int8_kernels import FEW_ROWS
from microturn.layers.int8_products import PANEL, in_panels, most_steps
from microturn.layers.linear import stacked


class Int8Linear:
    """A `Product` over a weight of its own, rounded to 8 bits.

    Args:
        weight: float32 [out, in].
        bias: float32 [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_out, num_in = weight.shape
        steps, scales = quantize(weight)
        self._weight = in_panels(steps).contiguous().numpy()
        self._scales = pad(scales, (0, len(self._weight) * PANEL - self.num_out), value=1.0).numpy()
        self._most_steps = most_steps(num_in)
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
        args = x.numpy(), self._most_steps, self._weight, self._scales, out.numpy()
        # Few rows wait for the weights in either case, and whole vectors ask for them in the steadier way.
        if len(x) > FEW_ROWS and amx_products.is_available():
            amx_kernels.round_and_multiply(*args, numba.get_num_threads())
        else:
            int8_kernels.round_and_multiply(*args)
        return out if self._bias is None else out.add_(self._bias)
