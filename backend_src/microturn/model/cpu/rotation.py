"""Rotation of a product's inputs by a Hadamard matrix, so that 8 bits are enough for them.

A few elements of a language model's hidden states are many times as large as the others, and would take the whole range
of integers. A rotation spreads each of them over its neighbours and leaves products as they are, if the weight's rows
are rotated as well (QuaRot: Ashkboos et al., 2024). Rows are rotated in blocks as long as the largest power of two in
their width, by the fast transform (Fino and Algazi, 1976): sums and differences of elements 1, 2, 4, … apart.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.extending import register_jitable
from numpy.typing import NDArray

from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    alternating,
    callable_by_kernels,
    exchanged,
    for_each_choice,
    load_vector,
    loop,
    multiply_add,
    store_vector,
)

_Array = NDArray[Any]

# Vectors that are rotated together in registers: half of these.
_MOST_VECTORS = 16 if HAS_AVX512 else 8
_NUMBERS_OF_VECTORS = [2**power for power in range(_MOST_VECTORS.bit_length())]


@register_jitable
def block_of(width: int) -> int:
    """Elements that are rotated together: the largest power of two that divides the width."""
    return width & -width


def _rotate_groups() -> Any:
    """Makes ``(x, out, num_groups, num_vectors)``: rotates groups of 1, 2, 4, … or _MOST_VECTORS vectors of x."""

    def emit(b: ir.IRBuilder, x: ir.Value, out: ir.Value, num_groups: ir.Value, num_vectors: ir.Value) -> None:
        def emit_groups(count: int) -> None:
            def rotate(group: ir.Value, _: Values) -> Values:
                places = [b.add(b.mul(group, INT(count * LANES)), INT(index * LANES)) for index in range(count)]
                vectors = [_rotated(b, load_vector(b, b.gep(x, [place]), LANES)) for place in places]
                distance = 1
                while distance < count:
                    for first in (index for index in range(count) if not index & distance):
                        low, high = vectors[first], vectors[first + distance]
                        vectors[first], vectors[first + distance] = b.fadd(low, high), b.fsub(low, high)
                    distance *= 2
                for vector, place in zip(vectors, places, strict=True):
                    store_vector(b, vector, b.gep(out, [place]))
                return []

            loop(b, num_groups, [], rotate)

        for_each_choice(b, num_vectors, _NUMBERS_OF_VECTORS, emit_groups)

    return callable_by_kernels(emit)


def _rotated(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sums and differences within a vector."""
    distance = 1
    while distance < LANES:
        vector = multiply_add(b, vector, alternating(distance), exchanged(b, vector, distance))
        distance *= 2
    return vector


_groups = _rotate_groups()


@numba.njit(nogil=True)
def rotate_row(x: _Array, out: _Array) -> None:
    """Rotates a row [width]; twice, it multiplies by the length of a block.

    An element's result depends on the elements of its block alone, in an order of their own.
    """
    width = x.shape[0]
    block = block_of(width)
    distance = min(block, _MOST_VECTORS * LANES)
    if distance < LANES:
        distance = 1
        for d in range(width):  # written out: a slice takes Numba three seconds to compile
            out[d] = x[d]
    else:
        _groups(x, out, width // distance, distance // LANES)
    while distance < block:
        for first in range(0, width, 2 * distance):
            low, high = out[first : first + distance], out[first + distance : first + 2 * distance]
            for d in range(distance):
                total, difference = low[d] + high[d], low[d] - high[d]
                low[d], high[d] = total, difference
        distance *= 2


@kernel(parallel=True)
def rotate(x: _Array, out: _Array) -> None:
    """Rotates rows, float32 [rows, width] and contiguous, into out."""
    for row in numba.prange(x.shape[0]):
        rotate_row(x[row], out[row])
