"""Products of integers in vectors."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from microturn.model.cpu.attention_operands import MOST_QUERY_STEPS, MOST_WEIGHT_STEPS
from microturn.model.cpu.integer_products import add_products_of_bytes
from microturn.model.cpu.vectors import LANES, callable_by_kernels, load_vector, store_vector

_Array = NDArray[Any]


def _emit(b: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value, sums: ir.Value) -> None:
    given = [load_vector(b, array, 4 * LANES) for array in (unsigned, signed)]
    store_vector(b, add_products_of_bytes(b, *given, load_vector(b, sums, LANES)), sums)


_add = callable_by_kernels(_emit)


@numba.njit
def _add_products(unsigned: _Array, signed: _Array, sums: _Array) -> None:
    _add(unsigned, signed, sums)


def test_the_largest_products_of_attention_are_added_exactly() -> None:
    """Keys without a sign times queries, and weights times values, of which memory may hold any."""
    rng = np.random.default_rng(0)
    for unsigned_end, signed_start, signed_end in (
        (255, -MOST_QUERY_STEPS, MOST_QUERY_STEPS),
        (MOST_WEIGHT_STEPS, -128, 127),
    ):
        for pick_unsigned in ([unsigned_end], [0, unsigned_end], range(unsigned_end + 1)):
            for pick_signed in ([signed_start], [signed_end], range(signed_start, signed_end + 1)):
                unsigned = rng.choice(pick_unsigned, 4 * LANES).astype(np.uint8)
                signed = rng.choice(pick_signed, 4 * LANES).astype(np.int8)
                sums = rng.integers(-1000, 1000, LANES, dtype=np.int32)
                products = (unsigned.astype(np.int64) * signed).reshape(LANES, 4).sum(1)
                expected = sums + products
                _add_products(unsigned, signed, sums)
                assert sums.tolist() == expected.tolist()
