"""The inner loops of native attention: scores, online softmax and weighted values of one block of keys.

Numba compiles plain loops well, but it keeps no block of sums in registers, so that each product costs a load and a
store of its sum. Here a block of sums stays in registers, and per term each operand is loaded once for the whole block
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).

Every row has sums of its own, added in an order that depends on nothing but the positions of its keys: a row's result
has the same bits, however many rows are computed beside it. Keys that a row does not see have a weight of exactly 0,
and change no bit either.

Arrays: ``queries`` [rows, lanes of a head], ``scores`` float32 [rows, KEY_BLOCK], ``weights`` [rows, KEY_BLOCK or its
pairs] and ``sums`` float32 [rows, padded_dim]; panels are as in `attention_panels`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from microturn.model.cpu.attention_operands import add_dot, are_pairs, num_terms, repeated, round_to_pairs
from microturn.model.cpu.attention_panels import KEY_BLOCK, Ahead
from microturn.model.cpu.vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    callable_by_kernels,
    exp2,
    fold,
    for_each_choice,
    in_all_lanes,
    lanes_within,
    load_vector,
    loop,
    maximum,
    multiply_add,
    splat,
    store_vector,
)

# A block of sums is up to so many rows by so many vectors: 16 of 32 registers, or 12 of 16.
ROWS_AT_ONCE = 4 if HAS_AVX512 else 3
_VECTORS_AT_ONCE = 4

# A masked score is so far below the initial peak that its weight is 0 even if all keys so far are masked.
_MASKED = -3e38
NO_SCORE = -1e30

_NUM_VECTORS = KEY_BLOCK // LANES
_FLOAT = ir.FloatType()


def scores() -> Any:
    """Makes ``(scores, panel, queries, row, num_rows, num_lanes, *ahead)``, for up to ROWS_AT_ONCE rows.

    ``scores[row, key] = sum over lanes of queries[row, lane] * panel[lane, key]``; `Ahead` with every lane a key.
    """

    def emit(b: ir.IRBuilder, scores: ir.Value, panel: ir.Value, queries: ir.Value, *args: ir.Value) -> None:
        (row, num_rows, num_lanes), ahead = args[:3], Ahead(*args[3:])

        def emit_rows(count: int) -> None:
            rows = [b.add(row, INT(index)) for index in range(count)]
            starts = [b.gep(queries, [b.mul(number, num_lanes)]) for number in rows]
            for first in range(0, KEY_BLOCK, _VECTORS_AT_ONCE * LANES):
                columns = range(first, first + _VECTORS_AT_ONCE * LANES, LANES)

                def add(lane: ir.Value, sums: Values, columns: range = columns) -> Values:
                    if columns.start == 0:
                        ahead.fetch(b, lane)
                    keys = b.gep(panel, [b.mul(lane, INT(KEY_BLOCK))])
                    vectors = [load_vector(b, b.gep(keys, [INT(column)]), LANES) for column in columns]
                    return _add_all(b, [repeated(b, b.gep(start, [lane])) for start in starts], vectors, sums)

                sums = iter(loop(b, num_lanes, [splat(0.0)] * (count * len(columns)), add, fills_registers=True))
                for number in rows:
                    to = b.gep(scores, [b.mul(number, INT(KEY_BLOCK))])
                    for column in columns:
                        store_vector(b, next(sums), b.gep(to, [INT(column)]))

        for_each_choice(b, num_rows, range(1, ROWS_AT_ONCE + 1), emit_rows)

    return callable_by_kernels(emit)


def softmax() -> Any:
    """Makes ``(pages, scores, weights, row, first, end, scales, peak, total, shrink)``: a step of the online softmax.

    To the base 2. Raises ``peak[row]`` to the highest score of the keys from `first` up to `end`, writes their weights
    relative to it and adds them to ``total[row]``; earlier sums are to be multiplied by ``shrink[row]``. The other keys
    have a weight of 0. Pages in int8 have ``scales`` [2, KEY_BLOCK], of keys and of values: the former belong to the
    scores, the latter to the weights that are written.
    """

    def emit(b: ir.IRBuilder, pages: ir.Value, scores: ir.Value, weights: ir.Value, *args: ir.Value) -> None:
        row, first, end, scales, peak, total, shrink = args
        has_scales = pages.type.pointee == ir.IntType(8)
        start = b.gep(scores, [b.mul(row, INT(KEY_BLOCK))])

        def scaled(vectors: Values, part: int) -> Values:
            if not has_scales:
                return vectors
            places = [b.gep(scales, [INT(part * KEY_BLOCK + index * LANES)]) for index in range(_NUM_VECTORS)]
            return [b.fmul(x, load_vector(b, at, LANES)) for x, at in zip(vectors, places, strict=True)]

        given = [load_vector(b, b.gep(start, [INT(index * LANES)]), LANES) for index in range(_NUM_VECTORS)]
        visible = [lanes_within(b, first, end, index * LANES) for index in range(_NUM_VECTORS)]
        given = [b.select(see, x, splat(_MASKED)) for see, x in zip(visible, scaled(given, 0), strict=True)]
        old_peak = in_all_lanes(b, b.gep(peak, [row]))
        top = given[0]
        for x in given[1:]:
            top = maximum(b, x, top)
        top = maximum(b, fold(b, top, 1, lambda x, y: maximum(b, x, y)), old_peak)
        factor = exp2(b, b.fsub(old_peak, top))
        results = [exp2(b, b.fsub(x, top)) for x in given]
        added = results[0]
        for x in results[1:]:
            added = b.fadd(added, x)
        added = fold(b, added, 1, b.fadd)
        old_total = in_all_lanes(b, b.gep(total, [row]))
        for array, value in ((peak, top), (shrink, factor), (total, multiply_add(b, old_total, factor, added))):
            b.store(b.extract_element(value, INT(0)), b.gep(array, [row]))

        pairs = are_pairs(weights)
        results = scaled(results, 1)
        if pairs:
            results = [round_to_pairs(b, *two) for two in zip(results[::2], results[1::2], strict=True)]
        to = b.gep(weights, [b.mul(row, INT(KEY_BLOCK // num_terms(pairs=pairs)))])
        for index, vector in enumerate(results):
            store_vector(b, vector, b.gep(to, [INT(index * LANES)]))

    return callable_by_kernels(emit)


def values(num_vectors: int) -> Any:
    """Makes ``(sums, shrink, panel, weights, row, num_rows, first_element, padded_dim, num_keys, *ahead)``.

    For up to ROWS_AT_ONCE rows and `num_vectors` vectors of elements from `first_element` on, ``sums[row] =
    shrink[row] * sums[row] + sum over keys of weights[row, key] * panel[key]``; `Ahead` with every second key one.
    """

    def emit(b: ir.IRBuilder, sums: ir.Value, shrink: ir.Value, panel: ir.Value, *args: ir.Value) -> None:
        (weights, row, num_rows, first_element, padded_dim, num_keys), ahead = args[:6], Ahead(*args[6:])
        terms = num_terms(pairs=are_pairs(panel))
        places = [b.add(first_element, INT(index * LANES)) for index in range(num_vectors)]
        num_lanes = b.udiv(b.add(num_keys, INT(terms - 1)), INT(terms))

        def emit_rows(count: int) -> None:
            rows = [b.add(row, INT(index)) for index in range(count)]
            factors = [b.gep(weights, [b.mul(number, INT(KEY_BLOCK // terms))]) for number in rows]
            addresses = [b.gep(sums, [b.add(b.mul(number, padded_dim), at)]) for number in rows for at in places]
            shrinks = [in_all_lanes(b, b.gep(shrink, [number])) for number in rows for _ in places]

            def add(lane: ir.Value, totals: Values) -> Values:
                ahead.fetch(b, b.udiv(b.mul(lane, INT(terms)), INT(2)))
                start = b.gep(panel, [b.mul(lane, padded_dim)])
                vectors = [load_vector(b, b.gep(start, [at]), LANES) for at in places]
                return _add_all(b, [repeated(b, b.gep(factor, [lane])) for factor in factors], vectors, totals)

            old = [b.fmul(load_vector(b, at, LANES), by) for at, by in zip(addresses, shrinks, strict=True)]
            for total, at in zip(loop(b, num_lanes, old, add, fills_registers=True), addresses, strict=True):
                store_vector(b, total, at)

        for_each_choice(b, num_rows, range(1, ROWS_AT_ONCE + 1), emit_rows)

    return callable_by_kernels(emit)


def merge() -> Any:
    """Makes ``(sums, peak, total, more_sums, more_peak, more_total, row, padded_dim)``: adds the sums of other keys.

    All sums of a row are relative to its peak.
    """

    def emit(b: ir.IRBuilder, sums: ir.Value, peak: ir.Value, total: ir.Value, *args: ir.Value) -> None:
        more_sums, more_peak, more_total, row, padded_dim = args
        known, more = (in_all_lanes(b, b.gep(of, [row])) for of in (peak, more_peak))
        top = maximum(b, more, known)
        factors = [exp2(b, b.fsub(of, top)) for of in (known, more)]

        def merged(x: ir.Value, y: ir.Value) -> ir.Value:
            return multiply_add(b, x, factors[0], b.fmul(y, factors[1]))

        totals = [in_all_lanes(b, b.gep(of, [row])) for of in (total, more_total)]
        for array, value in ((peak, top), (total, merged(*totals))):
            b.store(b.extract_element(value, INT(0)), b.gep(array, [row]))
        starts = [b.gep(of, [b.mul(row, padded_dim)]) for of in (sums, more_sums)]

        def merge_vector(index: ir.Value, _: Values) -> Values:
            places = [b.gep(start, [b.mul(index, INT(LANES))]) for start in starts]
            store_vector(b, merged(*(load_vector(b, at, LANES) for at in places)), places[0])
            return []

        loop(b, b.udiv(padded_dim, INT(LANES)), [], merge_vector)

    return callable_by_kernels(emit)


def _add_all(b: ir.IRBuilder, factors: Values, vectors: Values, sums: Values) -> Values:
    """sums[factor, vector] + factor * vector, for every factor with every vector."""
    products = [(factor, vector) for factor in factors for vector in vectors]
    return [add_dot(b, *product, total) for product, total in zip(products, sums, strict=True)]
