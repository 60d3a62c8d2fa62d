"""Matrix products over weights that the transformers model keeps using: one copy in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from microturn.model.cpu.stored_weight import as_stored


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


class Products(Protocol):
    """Creates products; `TorchLinear`, `Linear` and `Int8Linear` are of this kind."""

    def __call__(self, weight: Tensor, bias: Tensor | None, /) -> Product:
        """The product of a weight [out, in] and a bias [out], or None."""
        ...

    def fused(self, modules: Sequence[nn.Linear], /) -> Product:
        """The product of several modules, their outputs behind each other."""
        ...

    def of(self, module: nn.Linear, /) -> Product:
        """The product of one module."""
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


def stacked(modules: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Stacks the weights [out, in] and biases [out] of several modules; the bias is None if none has one.

    The weight of a single module is not copied.
    """
    weights = [as_stored(module.weight) for module in modules]
    return weights[0] if len(weights) == 1 else torch.cat(weights), stacked_biases(modules)


def stacked_biases(modules: Sequence[nn.Linear]) -> Tensor | None:
    """Stacks the biases [out] of several modules; None if none has one."""
    of_all = [module.bias for module in modules]
    bias = next((bias for bias in of_all if bias is not None), None)
    if bias is None:
        return None
    filled = [
        bias.new_zeros(module.out_features) if own is None else own for own, module in zip(of_all, modules, strict=True)
    ]
    return torch.cat([own.detach() for own in filled])
