"""Arrays that kernels find by their address: one of the same shape in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

_Array = NDArray[Any]


class Unlike(Exception):
    """Layers that one call cannot compute, since they differ or are of another kind; the argument says how."""


class LayerArrays(NamedTuple):
    """An array per layer, as an argument of kernels. It does not keep them alive, but for the first one.

    Attributes:
        addresses: int64 [layers].
        first: that of the first layer, for type and shape.
    """

    addresses: NDArray[np.int64]
    first: _Array

    @classmethod
    def of(cls, arrays: Sequence[_Array]) -> Self:
        """Arrays of one type and shape, contiguous.

        Raises:
            Unlike: they differ.
        """
        assert all(array.flags.c_contiguous for array in arrays)
        if len({(array.dtype, array.shape) for array in arrays}) > 1:
            raise Unlike("arrays of different types or shapes")
        return cls(np.array([array.ctypes.data for array in arrays], np.int64), arrays[0])


@intrinsic
def _pointer(_context: Any, address: Any, like: Any) -> Any:
    """The address as a pointer to elements of another array's type."""
    kind = types.CPointer(like.dtype)

    def emit(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(address, like), emit


@numba.njit(nogil=True)
def array_of(arrays: LayerArrays, layer: int) -> _Array:
    """The array of one layer."""
    array: _Array = numba.carray(_pointer(arrays.addresses[layer], arrays.first), arrays.first.shape)
    return array
