"""The inner loops of native attention: scores, online softmax and weighted values of one block of keys.

Numba compiles plain loops well, but it keeps no block of sums in registers, so that each product costs a load and a
store of its sum. Here a block of sums stays in registers, and per term each operand is loaded once for the whole block
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).

A *wide* tile has its rows in the lanes: nothing is ever added across lanes, and keys and values are read an element
at a time, each for up to 48 rows. A *narrow* tile, one query of a few heads, has the elements of its head in the
lanes: keys and values are read in whole vectors, which memory limits. Scores are summed over lanes, all those of a
vector's worth of keys at once, and lie there key by key.

Common arguments: ``*source`` are the five of a `Source`, the block's keys or values: ``source[t]`` is [head_dim].
``scores`` is [keys, tile rows], which the softmax turns into weights in place: whole vectors per key in a wide tile,
and NARROW_ROWS floats per key in a narrow one, so that NARROW_BLOCK keys fill a vector. The order of each sum is fixed,
so that a row's result depends on nothing else.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from microturn.model.cpu.attention_sources import Source
from microturn.model.cpu.vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    add_products,
    callable_by_kernels,
    exp2,
    fetch,
    fold,
    for_each_choice,
    in_all_lanes,
    load,
    load_repeated,
    loop,
    maximum,
    splat,
    store,
    store_first,
    sums_of_lanes,
)

# Wide: a block of sums is up to three vectors of rows by so many keys or elements: 24 of 32 registers, or 12 of 16.
MAX_VECTORS = 3
WIDE_BLOCK = 8 if HAS_AVX512 else 4

# Narrow: 4 rows by so many keys (scores) or vectors of elements (values): 16 of 32 registers, or 8 of 16.
NARROW_ROWS = 4
NARROW_BLOCK = LANES // NARROW_ROWS

WIDTHS = range(1, MAX_VECTORS + 1)


def wide_scores() -> Any:
    """Makes ``(scores, *source, queries, first_key, num_vectors)``, for WIDE_BLOCK keys.

    ``scores[t] = sum over d < head_dim of source[t, d] * queries[d]``; `queries` is [head_dim, rows].
    """

    def emit(b: ir.IRBuilder, scores: ir.Value, *args: ir.Value) -> None:
        source, (queries, first_key, num_vectors) = Source(*args[:5]), args[5:]
        keys = [b.add(first_key, INT(t)) for t in range(WIDE_BLOCK)]
        starts = [source.floats(b, key) for key in keys]

        def emit_width(width: int) -> None:
            def add(d: ir.Value, sums: Values) -> Values:
                elements = [in_all_lanes(b, b.gep(start, [d])) for start in starts]
                return add_products(b, elements, load(b, queries, d, width), sums)

            sums = loop(b, source.head_dim, [splat(0.0)] * (WIDE_BLOCK * width), add, fills_registers=True)
            for t, key in enumerate(keys):
                store(b, scores, key, sums[t * width : (t + 1) * width])

        for_each_choice(b, num_vectors, WIDTHS, emit_width)

    return callable_by_kernels(emit)


def wide_values(num_elements: int) -> Any:
    """Makes ``(sums, shrink, *source, weights, first_element, num_keys, num_vectors)``.

    ``sums[d] = shrink * sums[d] + sum over t < num_keys of source[t, d] * weights[t]`` for `num_elements` elements d
    from `first_element` on; `sums` is [head_dim, rows] and `shrink` [rows].
    """

    def emit(b: ir.IRBuilder, sums: ir.Value, shrink: ir.Value, *args: ir.Value) -> None:
        source, (weights, first_element, num_keys, num_vectors) = Source(*args[:5]), args[5:]
        rows = [b.add(first_element, INT(d)) for d in range(num_elements)]

        def emit_width(width: int) -> None:
            def add(t: ir.Value, totals: Values) -> Values:
                start = source.floats(b, t)
                elements = [in_all_lanes(b, b.gep(start, [row])) for row in rows]
                return add_products(b, elements, load(b, weights, t, width), totals)

            factors = load(b, shrink, INT(0), width)
            old = [b.fmul(x, f) for row in rows for x, f in zip(load(b, sums, row, width), factors, strict=True)]
            totals = loop(b, num_keys, old, add, fills_registers=True)
            for d, row in enumerate(rows):
                store(b, sums, row, totals[d * width : (d + 1) * width])

        for_each_choice(b, num_vectors, WIDTHS, emit_width)

    return callable_by_kernels(emit)


def narrow_scores() -> Any:
    """Makes ``(scores, *source, scales, queries, first_key)``, for NARROW_BLOCK keys.

    As `wide_scores`, but `queries` is [NARROW_ROWS, head_dim]; head_dim is a multiple of LANES.
    """

    def emit(b: ir.IRBuilder, scores: ir.Value, *args: ir.Value) -> None:
        source, (scales, queries, first_key) = Source(*args[:5]), args[5:]
        keys = [b.add(first_key, INT(t)) for t in range(NARROW_BLOCK)]
        starts = [(source.stored(b, key), source.scale(b, scales, key)) for key in keys]
        rows = [b.gep(queries, [b.mul(source.head_dim, INT(row))]) for row in range(NARROW_ROWS)]
        num_vectors = b.udiv(source.head_dim, INT(LANES))

        def add(vector: ir.Value, sums: Values) -> Values:
            at = b.mul(vector, INT(LANES))
            elements = [source.to_floats(b, b.gep(start, [at]), scale) for start, scale in starts]
            return add_products(b, elements, [load(b, row, vector, 1)[0] for row in rows], sums)

        sums = loop(b, num_vectors, [splat(0.0)] * (NARROW_BLOCK * NARROW_ROWS), add)
        store(b, scores, b.udiv(first_key, INT(NARROW_BLOCK)), [sums_of_lanes(b, sums)])

    return callable_by_kernels(emit)


def narrow_values(num_vectors: int) -> Any:
    """Makes ``(sums, shrink, *source, scales, ahead, weights, first_element, num_keys)``.

    As `wide_values`, for `num_vectors` vectors of elements from `first_element` on and `sums` [NARROW_ROWS, head_dim].
    With each key it has the values of the key `ahead` keys later fetched: the arithmetic is too short to wait for them.
    """

    def emit(b: ir.IRBuilder, sums: ir.Value, shrink: ir.Value, *args: ir.Value) -> None:
        source, (scales, ahead, weights, first_element, num_keys) = Source(*args[:5]), args[5:]
        row_starts = [b.add(first_element, b.mul(source.head_dim, INT(row))) for row in range(NARROW_ROWS)]
        rows = [b.gep(sums, [start]) for start in row_starts]

        def add(t: ir.Value, totals: Values) -> Values:
            later = b.gep(source.stored(b, b.add(t, ahead)), [first_element])
            for d in range(0, num_vectors * LANES, source.line_len):
                fetch(b, b.gep(later, [INT(d)]))
            weight = b.gep(weights, [b.mul(t, INT(NARROW_ROWS))])
            factors = [in_all_lanes(b, b.gep(weight, [INT(row)])) for row in range(NARROW_ROWS)]
            start, scale = b.gep(source.stored(b, t), [first_element]), source.scale(b, scales, t)
            places = [b.gep(start, [INT(d)]) for d in range(0, num_vectors * LANES, LANES)]
            elements = [source.to_floats(b, place, scale) for place in places]
            return add_products(b, factors, elements, totals)

        old = []
        for index, row in enumerate(rows):
            factor = in_all_lanes(b, b.gep(shrink, [INT(index)]))
            old += [b.fmul(vector, factor) for vector in load(b, row, INT(0), num_vectors)]
        totals = loop(b, num_keys, old, add)
        for index, row in enumerate(rows):
            store(b, row, INT(0), totals[index * num_vectors : (index + 1) * num_vectors])

    return callable_by_kernels(emit)


def softmax() -> Any:
    """Makes ``(scores, peak, total, shrink, num_keys, num_vectors)``: a step of the online softmax, to the base 2.

    Raises `peak` to the highest score, turns scores into weights relative to it and adds them to `total`; earlier sums
    are to be multiplied by `shrink`. All three are [rows].
    """

    def emit(b: ir.IRBuilder, scores: ir.Value, peak: ir.Value, total: ir.Value, *args: ir.Value) -> None:
        shrink, num_keys, num_vectors = args

        def emit_width(width: int) -> None:
            def raise_peaks(t: ir.Value, known: Values) -> Values:
                return [maximum(b, x, top) for x, top in zip(load(b, scores, t, width), known, strict=True)]

            def weigh(t: ir.Value, totals: Values) -> Values:
                weights = [exp2(b, b.fsub(x, top)) for x, top in zip(load(b, scores, t, width), peaks, strict=True)]
                store(b, scores, t, weights)
                return [b.fadd(x, weight) for x, weight in zip(totals, weights, strict=True)]

            old = load(b, peak, INT(0), width)
            peaks = loop(b, num_keys, old, raise_peaks)
            factors = [exp2(b, b.fsub(x, top)) for x, top in zip(old, peaks, strict=True)]
            totals = [b.fmul(x, factor) for x, factor in zip(load(b, total, INT(0), width), factors, strict=True)]
            store(b, total, INT(0), loop(b, num_keys, totals, weigh))
            store(b, peak, INT(0), peaks)
            store(b, shrink, INT(0), factors)

        for_each_choice(b, num_vectors, WIDTHS, emit_width)

    return callable_by_kernels(emit)


def narrow_softmax() -> Any:
    """Makes ``(scores, peak, total, shrink, num_vectors)``: as `softmax`, for so many vectors of NARROW_BLOCK keys.

    Only the first NARROW_ROWS elements of the three are used.
    """

    def emit(b: ir.IRBuilder, scores: ir.Value, peak: ir.Value, total: ir.Value, *args: ir.Value) -> None:
        shrink, num_vectors = args

        def raise_peaks(index: ir.Value, known: Values) -> Values:
            return [maximum(b, load(b, scores, index, 1)[0], known[0])]

        def weigh(index: ir.Value, totals: Values) -> Values:
            weights = exp2(b, b.fsub(load(b, scores, index, 1)[0], peaks))
            store(b, scores, index, [weights])
            return [b.fadd(totals[0], weights)]

        old = load_repeated(b, peak, NARROW_ROWS)
        (peaks,) = loop(b, num_vectors, [old], raise_peaks)
        peaks = fold(b, peaks, NARROW_ROWS, lambda x, y: maximum(b, x, y))
        factors = exp2(b, b.fsub(old, peaks))
        (sums,) = loop(b, num_vectors, [splat(0.0)], weigh)
        sums = fold(b, sums, NARROW_ROWS, b.fadd)
        old_totals = b.fmul(load_repeated(b, total, NARROW_ROWS), factors)
        store_first(b, b.fadd(old_totals, sums), total, NARROW_ROWS)
        store_first(b, peaks, peak, NARROW_ROWS)
        store_first(b, factors, shrink, NARROW_ROWS)

    return callable_by_kernels(emit)
