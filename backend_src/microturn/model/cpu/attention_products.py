"""The inner loops of native attention: scores and weighted values of one block of keys.

Numba compiles plain loops well, but it keeps no block of sums in registers, so that each product costs a load and a
store of its sum. Here a block of sums stays in registers, and per term each operand is loaded once for the whole block
(Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).

Every row has sums of its own, added in an order that depends on nothing but the positions of its keys: a row's result
has the same bits, however many rows are computed beside it. Keys that a row does not see have a weight of exactly 0,
and change no bit either.

Arrays: ``queries`` [rows, lanes of a head] and ``sums`` float32 [rows, padded_dim] of all rows; of those at hand,
``scores`` float32 [ROWS_AT_ONCE, KEY_BLOCK] and ``weights`` [ROWS_AT_ONCE, lanes of KEY_BLOCK]. Blocks are as in
`attention_panels`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from microturn.model.cpu.attention_operands import operands_of, repeated
from microturn.model.cpu.attention_panels import KEY_BLOCK, NUM_KEY_VECTORS, Block
from microturn.model.cpu.vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    callable_by_kernels,
    choose,
    exp2,
    for_each_choice,
    in_all_lanes,
    load_first,
    load_vector,
    loop,
    maximum,
    multiply_add,
    store_vector,
)

# A block of sums is up to so many rows by so many vectors, half of the registers: 16 of 32, or 8 of 16. With 12 of 16
# LLVM keeps some sums in memory, and the loops take 1.5 times as long.
ROWS_AT_ONCE = 4
VECTORS_AT_ONCE = 4 if HAS_AVX512 else 2

_Add = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]


def scores() -> Any:
    """Makes ``(scores, *block, next_at, queries, query_scales, offsets, row, num_rows, num_lanes, padded_dim, …)``.

    The last argument is `fetches`: where it is not 0, the keys at `next_at` are prefetched, but the last. For up to
    ROWS_AT_ONCE rows, ``scores[index, key]`` is the sum over elements of ``queries[row + index, element] *
    keys[element, key]``. `query_scales` and `offsets` [rows] are of integers: the latter are where their sums begin.
    """

    def emit(b: ir.IRBuilder, scores: ir.Value, *args: ir.Value) -> None:
        block, ahead = Block(*args[:5]), Block(*args[:5])._replace(at=args[5])
        queries, query_scales, offsets, row, num_rows, num_lanes, padded_dim, fetches = args[6:]
        of = operands_of(block.pages)
        num_vectors_of_lane = of.page_terms // of.terms
        row_len = b.udiv(padded_dim, INT(of.terms))

        def emit_rows(count: int) -> None:
            rows = [b.add(row, INT(index)) for index in range(count)]
            starts = [b.gep(queries, [b.mul(number, row_len)]) for number in rows]

            def first_sums(number: ir.Value) -> ir.Value:
                return in_all_lanes(b, b.gep(offsets, [number])) if of.are_integers else of.zeros

            for first in range(0, NUM_KEY_VECTORS, VECTORS_AT_ONCE):
                vectors = range(first, first + VECTORS_AT_ONCE)

                def add(lane: ir.Value, sums: Values, vectors: range = vectors) -> Values:
                    if vectors.start == 0:
                        with b.if_then(b.icmp_signed("!=", fetches, INT(0))):
                            ahead.fetch_keys(b, lane)
                    given = [load_vector(b, block.key_address(b, at, lane), LANES * of.page_terms) for at in vectors]
                    columns = zip(*(of.of_keys(b, elements) for elements in given), strict=True)
                    for number, column in enumerate(columns):
                        at = b.add(b.mul(lane, INT(num_vectors_of_lane)), INT(number))
                        factors = [repeated(b, b.gep(start, [at])) for start in starts]
                        sums = _add_all(b, of.add_keys, factors, list(column), sums)
                    return sums

                initial = [first_sums(number) for number in rows for _ in vectors]
                sums = iter(loop(b, num_lanes, initial, add, fills_registers=True))
                for index, number in enumerate(rows):
                    scale = in_all_lanes(b, b.gep(query_scales, [number]))
                    to = b.gep(scores, [INT(index * KEY_BLOCK)])
                    for vector in vectors:
                        store_vector(b, of.floats(b, next(sums), scale), b.gep(to, [INT(vector * LANES)]))

        for_each_choice(b, num_rows, range(1, ROWS_AT_ONCE + 1), emit_rows)

    return callable_by_kernels(emit)


def values(num_vectors: int, *, is_part: bool = False) -> Any:
    """Makes ``(sums, *block, next_at, shrink, weights, weight_scales, row, num_rows, first_element, padded_dim, …)``.

    The last two arguments are `num_keys` and `fetches`. For up to ROWS_AT_ONCE rows and `num_vectors` vectors of
    elements from `first_element` on, ``sums[row] = shrink[row] * sums[row] + sum over keys of weights[index, key] *
    values[key]``. Where `fetches` is not 0, the values at `next_at` are prefetched, but the last.

    Args:
        num_vectors: see above.
        is_part: the vector is the last one of a head and has `num_elements`, a further argument, at the end.
    """

    def emit(b: ir.IRBuilder, sums: ir.Value, *args: ir.Value) -> None:
        block, ahead = Block(*args[:5]), Block(*args[:5])._replace(at=args[5])
        shrink, weights, weight_scales, row, num_rows, first_element, padded_dim, num_keys, fetches = args[6:15]
        of = operands_of(block.pages)
        terms = of.page_terms
        num_vectors_of_place = terms // of.terms
        row_len = KEY_BLOCK // of.terms
        first = b.mul(first_element, INT(terms))
        first_lane = b.udiv(first_element, INT(terms))

        def operands_at(place: ir.Value) -> list[Values]:
            start = b.gep(block.value_address(b, place), [first])
            if is_part:
                parts = [load_first(b, start, LANES * terms, b.mul(args[15], INT(terms)))]
            else:
                starts = [b.gep(start, [INT(index * LANES * terms)]) for index in range(num_vectors)]
                parts = [load_vector(b, address, LANES * terms) for address in starts]
            return [of.of_values(b, part) for part in parts]

        def emit_rows(count: int) -> None:
            rows = [b.add(row, INT(index)) for index in range(count)]
            factors = [b.gep(weights, [INT(index * row_len)]) for index in range(count)]

            def add_operands(place: ir.Value, operands: list[Values], totals: Values) -> Values:
                for number, column in enumerate(zip(*operands, strict=True)):
                    index = b.add(b.mul(place, INT(num_vectors_of_place)), INT(number))
                    repeats = [repeated(b, b.gep(factor, [index])) for factor in factors]
                    totals = _add_all(b, of.add_values, repeats, list(column), totals)
                return totals

            # The lanes that hold as much as these vectors: so a head's are fetched once by all that add its values.
            num_fetched = b.select(b.icmp_signed("!=", fetches, INT(0)), INT(num_vectors * LANES // terms), INT(0))

            def add(place: ir.Value, totals: Values) -> Values:
                with b.if_then(b.icmp_signed("<", place, num_fetched)):
                    ahead.fetch_values(b, b.add(first_lane, place))
                return add_operands(place, operands_at(place), totals)

            # A place may have keys behind the last one, which were never written: an integer times 0 is 0.
            up_to = b.add(num_keys, INT(terms - 1)) if of.are_integers else num_keys
            num_places, totals = b.udiv(up_to, INT(terms)), [of.zeros] * (count * num_vectors)
            has_places = b.icmp_signed(">", num_places, INT(0))
            totals = choose(b, has_places, totals, lambda old: loop(b, num_places, old, add, fills_registers=True))
            if terms > 1 and not of.are_integers:
                # A float may be NaN, and is left out.
                def add_last(totals: Values) -> Values:
                    operands = [of.first_terms(b, part) for part in operands_at(num_places)]
                    return add_operands(num_places, operands, totals)

                totals = choose(b, b.icmp_signed("!=", b.urem(num_keys, INT(terms)), INT(0)), totals, add_last)
            new = iter(totals)
            for number in rows:
                by, scale = (in_all_lanes(b, b.gep(array, [number])) for array in (shrink, weight_scales))
                start = b.gep(sums, [b.add(b.mul(number, padded_dim), first_element)])
                for index in range(num_vectors):
                    to = b.gep(start, [INT(index * LANES)])
                    store_vector(b, multiply_add(b, load_vector(b, to, LANES), by, of.floats(b, next(new), scale)), to)

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


def _add_all(b: ir.IRBuilder, add: _Add, factors: Values, vectors: Values, sums: Values) -> Values:
    """sums[factor, vector] + factor * vector, for every factor with every vector."""
    products = [(factor, vector) for factor in factors for vector in vectors]
    return [add(b, *product, total) for product, total in zip(products, sums, strict=True)]
