"""Rows of floats, rotated and rounded to integers times a scale of the row: inputs of products, weights and queries.

The integers are those of `microturn.kv.quantization`. A row's integers and scale depend on that row only.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numpy.typing import NDArray

from microturn.kv.quantization import LEAST_SCALE
from microturn.model.cpu.integer_products import UNSIGNED_OFFSET
from microturn.model.cpu.rotation import rotate_row
from microturn.model.cpu.vectors import (
    INT,
    LANES,
    Values,
    broadcast,
    callable_by_kernels,
    choose,
    fold,
    load_first,
    load_vector,
    loop,
    multiply_add,
    nearest_ints,
    splat,
    store_vector,
)

_Array = NDArray[Any]

_INT32, _FLOAT = ir.IntType(32), ir.FloatType()
_INTS, _FLOATS = ir.VectorType(_INT32, LANES), ir.VectorType(_FLOAT, LANES)
_MAGNITUDE = _INTS([0x7FFFFFFF] * LANES)  # all bits but the sign: as integers, floats are ordered, NaN above infinity


def scale_of(b: ir.IRBuilder, x: ir.Value, width: ir.Value, most_steps: ir.Value) -> ir.Value:
    """The scale, in all lanes, with which a row's largest integer is `most_steps`, a float.

    That of a row with a non-finite element is not finite.
    """

    def magnitude(vector: ir.Value) -> ir.Value:
        return b.and_(b.bitcast(vector, _INTS), _MAGNITUDE)

    def larger(one: ir.Value, other: ir.Value) -> ir.Value:
        return b.select(b.icmp_signed(">", one, other), one, other)

    def raise_largest(index: ir.Value, largest: Values) -> Values:
        return [larger(magnitude(load_vector(b, b.gep(x, [b.mul(index, INT(LANES))]), LANES)), largest[0])]

    num_vectors, last = _whole_and_last(b, x, width)
    has_vectors = b.icmp_signed(">", num_vectors, INT(0))
    (largest,) = choose(b, has_vectors, [magnitude(last)], lambda initial: loop(b, num_vectors, initial, raise_largest))
    scale = b.fdiv(b.bitcast(fold(b, largest, 1, larger), _FLOATS), broadcast(b, most_steps))
    least = splat(LEAST_SCALE)
    return b.select(b.fcmp_ordered("<", scale, least), least, scale)


def _whole_and_last(b: ir.IRBuilder, x: ir.Value, width: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The number of whole vectors of a row, and what is behind them as one with zeros at its end."""
    num_last = b.urem(width, INT(LANES))
    return b.udiv(width, INT(LANES)), load_first(b, b.gep(x, [b.sub(width, num_last)]), LANES, num_last)


def _round_row() -> Any:
    """Makes ``(x, width, most_steps, steps, first_step, scales, offsets, row)``; see `quantize_row`."""

    def emit(b: ir.IRBuilder, x: ir.Value, width: ir.Value, most_steps: ir.Value, *args: ir.Value) -> None:
        steps, first_step, scales, offsets, row = args
        scale = scale_of(b, x, width, b.sitofp(most_steps, _FLOAT))
        inverse = b.fdiv(splat(1.0), scale)
        kind = ir.VectorType(steps.type.pointee, LANES)
        start = b.gep(steps, [first_step])

        def round_vector(index: ir.Value, vector: ir.Value, total: ir.Value) -> ir.Value:
            # The quotient without a division, rounded correctly where the CPU has FMA (Markstein, "Computation of
            # elementary functions on the IBM RISC System/6000 processor", 1990): what a product with the inverse leaves
            # is added.
            quotient = b.fmul(vector, inverse)
            rest = multiply_add(b, b.fneg(quotient), scale, vector)
            rounded = nearest_ints(b, multiply_add(b, rest, inverse, quotient))
            store_vector(b, b.trunc(rounded, kind), b.gep(start, [b.mul(index, INT(LANES))]))
            return b.add(total, rounded)

        def round_whole(index: ir.Value, totals: Values) -> Values:
            vector = load_vector(b, b.gep(x, [b.mul(index, INT(LANES))]), LANES)
            return [round_vector(index, vector, totals[0])]

        num_vectors, last = _whole_and_last(b, x, width)
        initial, has_vectors = [_INTS([0] * LANES)], b.icmp_signed(">", num_vectors, INT(0))
        totals = choose(b, has_vectors, initial, lambda none: loop(b, num_vectors, none, round_whole))
        has_last = b.icmp_signed("!=", b.urem(width, INT(LANES)), INT(0))
        totals = choose(b, has_last, totals, lambda some: [round_vector(num_vectors, last, some[0])])
        total = b.extract_element(fold(b, totals[0], 1, b.add), _INT32(0))
        b.store(b.mul(total, _INT32(-UNSIGNED_OFFSET)), b.gep(offsets, [row]))
        b.store(b.extract_element(scale, _INT32(0)), b.gep(scales, [row]))

    return callable_by_kernels(emit)


_round = _round_row()


@numba.njit(nogil=True)
def quantize_row(
    x: _Array,
    rotated: _Array,
    most_steps: int,
    steps: _Array,
    first_step: int,
    scales: _Array,
    offsets: _Array,
    row: int,
) -> None:
    """Rotates a row and rounds it to integers, of which the largest is `most_steps`, times a scale.

    Args:
        x: float32 [width].
        rotated: float32 [width], scratch.
        most_steps: see above.
        steps: int8 or int16, written from `first_step` on; zeros behind the width, up to a multiple of LANES.
        first_step: see `steps`.
        scales: float32 [rows], written at `row`.
        offsets: int32 [rows], written at `row`: what is added to a sum of products, negated, by UNSIGNED_OFFSET in the
            integers' other factors.
        row: see above.
    """
    rotate_row(x, rotated)
    _round(rotated, x.shape[0], most_steps, steps, first_step, scales, offsets, row)
