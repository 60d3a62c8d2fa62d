"""A weight that stays in memory as its file has it, in bfloat16 or float16, under transformers' own modules.

They compute in float32. A product by `torch.nn.functional.linear` widens the weight in registers, so that it reads half
as much; any other operation gets a float32 copy for the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

# Torch's product of more rows with a widened copy is faster than the kernel's, which is made for few.
_MOST_ROWS = 32

# Operations whose result is stored likewise; those that tell only where and how large a tensor is.
_VIEWS = {Tensor.__getitem__, Tensor.detach, Tensor.requires_grad_}
_FACTS = {Tensor.data_ptr, Tensor.dim, Tensor.numel, Tensor.size, Tensor.stride, Tensor.__len__} | {
    getattr(Tensor, name).__get__ for name in ("device", "is_meta", "nbytes", "ndim", "requires_grad", "shape")
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]

_by_torch = False


class StoredWeight(Tensor):
    """A weight of a narrow type that others see as float32."""

    @classmethod
    def of(cls, weight: Tensor) -> Self:
        """Over the memory of a weight of two or more dimensions."""
        stored: Self = Tensor._make_subclass(cls, as_stored(weight))
        return stored

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func == _DTYPE:
            return torch.float32
        with torch._C.DisableTorchFunctionSubclass():
            if func in _VIEWS:
                return cls.of(func(*args, **given))
            if func in _FACTS or func == _SET_DATA:
                return func(*args, **given)
            if func is F.embedding:  # the rows of some tokens
                return func(*tree_map_only(cls, as_stored, args), **given).float()
            if func is F.linear and not given and not _by_torch:
                product = _product(*args)
                if product is not None:
                    return product
            return func(*tree_map_only(cls, _widened, args), **tree_map_only(cls, _widened, dict(given)))


def as_stored(weight: Tensor) -> Tensor:
    """The weight as a tensor of the type that it is stored in, over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.detach().as_subclass(Tensor)


@contextmanager
def products_by_torch() -> Iterator[None]:
    """Has products widened and computed by torch meanwhile, as in transformers: what ours are held against."""
    global _by_torch
    _by_torch = True
    try:
        yield
    finally:
        _by_torch = False


def _widened(weight: Tensor) -> Tensor:
    return as_stored(weight).float()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`F.linear` by our kernel; None where that cannot compute it, or others are faster."""
    from microturn.model.cpu import float_products  # what only a CPU needs: Numba

    stored, width = as_stored(weight), x.shape[-1]
    num_rows = x.numel() // width
    if x.dtype != torch.float32 or num_rows > _MOST_ROWS or stored.dim() != 2 or not float_products.fits(stored):
        return None
    rows, out = x.detach().reshape(num_rows, width).contiguous(), x.new_empty(num_rows, len(stored))
    float_products.multiply(rows.numpy(), float_products.as_array(stored), out.numpy(), 0)
    return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], len(stored))
