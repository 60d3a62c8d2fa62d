"""Matrix products over weights that the transformers model keeps using: one copy in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from microturn.model.cpu import float_products


class Product(Protocol):
    """One or several `nn.Linear` with the same input as one product.

    Attributes:
        num_out: width of a result.
        num_bytes: of the weights in memory.
    """

    num_out: int
    num_bytes: int

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the product of x [rows, in] into out [rows, out], both contiguous, and returns it."""
        ...


class TorchLinear:
    """A `Product` by torch, for any type and device.

    Args:
        weight: [out, in].
        bias: [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_out = len(weight)
        self.num_bytes = weight.nbytes
        self.weight = weight
        self.bias = bias

    @classmethod
    def fused(cls, modules: Sequence[nn.Linear]) -> Self:
        """Stacks the outputs of several modules; their own weights become views of the stack."""
        weight, bias = stacked(modules)
        first = 0
        for module in modules:
            module.weight.data = weight[first : first + module.out_features]
            first += module.out_features
        return cls(weight, bias)

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        """The product of one module, over its own weight."""
        return cls(module.weight.detach(), None if module.bias is None else module.bias.detach())

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`."""
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


class Linear(TorchLinear):
    """A `Product` in float32 on a CPU that computes each row in the same way: bitwise the same in any batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight_array = weight.numpy() if float_products.fits(weight) else None

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """See `Product`."""
        if self._weight_array is not None:
            float_products.multiply(x.numpy(), self._weight_array, out.numpy())
        else:
            for row, result in zip(x, out, strict=True):
                torch.mv(self.weight, row, out=result)
        return out if self.bias is None else out.add_(self.bias)


def stacked(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Stacks the weights [out, in] and biases [out] of several modules; the bias is None if none has one."""
    weight = torch.cat([module.weight.detach() for module in modules])
    if all(module.bias is None for module in modules):
        return weight, None
    biases = [weight.new_zeros(module.out_features) if module.bias is None else module.bias for module in modules]
    return weight, torch.cat([bias.detach() for bias in biases])
