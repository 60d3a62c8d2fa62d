"""The soft cap of logits, in whole vectors, so that all elements are computed alike: see `stepwise` for torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.vectors import (
    INT,
    LANES,
    Values,
    broadcast,
    callable_by_kernels,
    load_vector,
    loop,
    store_vector,
    tanh,
)

_Array = NDArray[Any]


def _cap_row() -> Any:
    """Makes ``(logits, first, width, soft_cap)``, for one of the rows of `cap`."""

    def emit(b: ir.IRBuilder, logits: ir.Value, first: ir.Value, width: ir.Value, soft_cap: ir.Value) -> None:
        cap = broadcast(b, soft_cap)

        def capped(at: ir.Value) -> tuple[ir.Value, ir.Value]:
            place = b.gep(logits, [b.add(first, at)])
            return b.fmul(tanh(b, b.fdiv(load_vector(b, place, LANES), cap)), cap), place

        def cap_vector(index: ir.Value, _: Values) -> Values:
            store_vector(b, *capped(b.mul(index, INT(LANES))))
            return []

        # The last vector begins early enough to be full, and is read before the others are written.
        last = capped(b.sub(width, INT(LANES)))
        loop(b, b.udiv(width, INT(LANES)), [], cap_vector)
        store_vector(b, *last)

    return callable_by_kernels(emit)


_row = _cap_row()


@kernel()
def cap(logits: _Array, soft_cap: np.float32) -> None:
    """Caps all rows (see `scores.soft_capped`).

    Args:
        logits: float32 [rows, width], changed in place; a row has a vector at least.
        soft_cap: positive.
    """
    num_rows, width = logits.shape
    for row in range(num_rows):
        _row(logits, row * width, width, soft_cap)
