"""Matrix products in float32 on a CPU, over weights that the transformers model keeps using: one copy in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from microturn.model.cpu import float_products
from microturn.model.cpu.stored_weight import as_stored
from microturn.model.products import stacked_biases


class Linear:
    """A `Product` in float32 on a CPU that computes each row in the same way: bitwise the same in any batch.

    Attributes:
        weights: for kernels, over the same memory (see `float_products.as_array`).

    Args:
        weights: [out, in] each, float32 or as they are stored; their rows follow each other.
        bias: float32 [out], or None.
    """

    def __init__(self, weights: Tensor | Sequence[Tensor], bias: Tensor | None) -> None:
        stored = [as_stored(weight) for weight in ([weights] if isinstance(weights, Tensor) else weights)]
        self.num_out = sum(map(len, stored))
        self.num_bytes = sum(weight.nbytes for weight in stored)
        self.weights = [float_products.as_array(weight) for weight in stored]
        self._by_torch = None if all(map(float_products.fits, stored)) else stored
        self._bias = bias

    @classmethod
    def fused(cls, modules: Sequence[nn.Linear]) -> Self:
        """The product of several modules, over their own weights."""
        return cls([module.weight for module in modules], stacked_biases(modules))

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        """The product of one module, over its own weight."""
        return cls.fused([module])

    @property
    def is_native(self) -> bool:
        """Whether kernels can compute it: the sides of its weights fit."""
        return self._by_torch is None

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`."""
        first = 0
        if self._by_torch is None:
            for weight in self.weights:
                float_products.multiply(x.numpy(), weight, out.numpy(), first)
                first += len(weight)
        else:
            for stored in self._by_torch:
                wide, last = stored.float(), first + len(stored)
                for row, result in zip(x, out[:, first:last], strict=True):
                    # The order of a sum depends on where a row lies: a copy lies as any other.
                    result.copy_(torch.mv(wide, row.clone()))
                first = last
        return out if self._bias is None else out.add_(self._bias)
