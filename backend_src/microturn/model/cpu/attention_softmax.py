"""The online softmax of one block of keys (Milakov and Gimelshein, 2018); arrays as in `attention_products`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from microturn.kv.quantization import LEAST_SCALE
from microturn.model.cpu.attention_operands import MOST_WEIGHT_STEPS, operands_of
from microturn.model.cpu.attention_panels import KEY_BLOCK, NUM_KEY_VECTORS, Block
from microturn.model.cpu.attention_products import ROWS_AT_ONCE
from microturn.model.cpu.vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    broadcast,
    callable_by_kernels,
    exp2,
    fold,
    for_each_choice,
    in_all_lanes,
    lanes_within,
    load_vector,
    loop_any,
    maximum,
    multiply_add,
    splat,
    store_vector,
    tanh,
)

# Rows whose softmax is computed at once: their scores fill half of the registers.
_SOFTMAX_ROWS = 4 if HAS_AVX512 else 1

# Prefetches are made in so many parts, between the steps of the first rows' softmax.
_FETCH_PARTS = 4

# A masked score is so far below the initial peak that its weight is 0 even if all keys so far are masked.
_MASKED = -3e38
NO_SCORE = -1e30


def softmax(*, is_capped: bool = False) -> Any:
    """Makes ``(scores, *block, next_at, weights, weight_scales, row, num_rows, first, end, *scales, peak, total, …)``.

    Behind them are `shrink`, `num_lanes` and `fetches`: where it is not 0, the last group of the keys and values at
    `next_at` is prefetched. The last argument is `soft_cap` where it `is_capped`.

    A step of the online softmax, to the base 2, for up to ROWS_AT_ONCE rows, whose scores and weights begin at index 0.
    Raises ``peak[row]`` to the highest score of the keys from ``first[row]`` up to ``end[row]``, writes their weights
    relative to it and adds them to ``total[row]``; earlier sums are to be multiplied by ``shrink[row]``. The other keys
    have a weight of 0. Three arguments are of pages in int8: all scales, and the offsets of those of keys and of values
    (see `Block.scales_of`). The former belong to the scores, the latter to the weights, which are written as integers
    times ``weight_scales[row]``. Scores with a cap are given as parts of it: they become ``soft_cap * tanh(score)``.
    """

    def emit(b: ir.IRBuilder, scores: ir.Value, *args: ir.Value) -> None:
        block, ahead = Block(*args[:5]), Block(*args[:5])._replace(at=args[5])
        weights, weight_scales, row, num_rows, first, end, scales, to_keys, to_values = args[6:15]
        peak, total, shrink, num_lanes, fetches, *soft_cap = args[15:]
        of = operands_of(block.pages)
        lanes_of_part = b.udiv(b.add(num_lanes, INT(_FETCH_PARTS - 1)), INT(_FETCH_PARTS))
        num_fetched = b.select(b.icmp_signed("!=", fetches, INT(0)), lanes_of_part, INT(0))

        def fetch_part(number: int, indices: Sequence[int]) -> None:
            if 0 not in indices:
                return
            first_lane = b.mul(num_fetched, INT(number))

            def fetch_lane(index: ir.Value, _: Values) -> Values:
                ahead.fetch_last(b, b.add(first_lane, index))
                return []

            loop_any(b, num_fetched, fetch_lane)

        def scaled(vectors: Values, offset: ir.Value) -> Values:
            if not of.are_integers:
                return vectors
            return [b.fmul(x, block.scales_of(b, scales, index, offset)) for index, x in enumerate(vectors)]

        def capped(vectors: Values) -> Values:
            cap = broadcast(b, *soft_cap)
            return [b.fmul(tanh(b, x), cap) for x in vectors]

        def highest(vectors: Values) -> ir.Value:
            top = vectors[0]
            for x in vectors[1:]:
                top = maximum(b, x, top)
            return fold(b, top, 1, lambda x, y: maximum(b, x, y))

        def summed(vectors: Values) -> ir.Value:
            added = vectors[0]
            for x in vectors[1:]:
                added = b.fadd(added, x)
            return fold(b, added, 1, b.fadd)

        def scores_of(index: int) -> Values:
            start = b.gep(scores, [INT(index * KEY_BLOCK)])
            given = [load_vector(b, b.gep(start, [INT(vector * LANES)]), LANES) for vector in range(NUM_KEY_VECTORS)]
            vectors = scaled(given, to_keys)
            return capped(vectors) if is_capped else vectors

        def visible_to(number: ir.Value) -> Values:
            bounds = [b.load(b.gep(array, [number])) for array in (first, end)]
            return [lanes_within(b, bounds[0], bounds[1], index * LANES) for index in range(NUM_KEY_VECTORS)]

        def chosen(masks: Values, vectors: Values, otherwise: float) -> Values:
            return [b.select(mask, x, splat(otherwise)) for mask, x in zip(masks, vectors, strict=True)]

        def store(value: ir.Value, array: ir.Value, number: ir.Value) -> None:
            b.store(b.extract_element(value, INT(0)), b.gep(array, [number]))

        def emit_rows(indices: Sequence[int]) -> None:
            """Each step for all rows, before the next one: a row's steps wait for each other."""
            rows = [b.add(row, INT(index)) for index in indices]
            masks = [visible_to(number) for number in rows]
            given = [chosen(*of_row, _MASKED) for of_row in zip(masks, map(scores_of, indices), strict=True)]
            fetch_part(0, indices)
            old_peaks = [in_all_lanes(b, b.gep(peak, [number])) for number in rows]
            tops = [maximum(b, highest(x), old) for x, old in zip(given, old_peaks, strict=True)]
            fetch_part(1, indices)
            factors = [exp2(b, b.fsub(old, top)) for old, top in zip(old_peaks, tops, strict=True)]
            results = [[exp2(b, b.fsub(x, top)) for x in of_row] for of_row, top in zip(given, tops, strict=True)]
            fetch_part(2, indices)
            sums = [summed(of_row) for of_row in results]
            for number, top, factor, added in zip(rows, tops, factors, sums, strict=True):
                old_total = in_all_lanes(b, b.gep(total, [number]))
                store(top, peak, number)
                store(factor, shrink, number)
                store(multiply_add(b, old_total, factor, added), total, number)
            fetch_part(3, indices)

            if of.are_integers:
                # Only what a row sees may decide on its scale: the others' weights are 0, whatever their scales are.
                results = [
                    chosen(mask, scaled(of_row, to_values), 0.0) for mask, of_row in zip(masks, results, strict=True)
                ]
                # A row that sees nothing here has weights of 0: their scale is such that its inverse is finite.
                least = splat(MOST_WEIGHT_STEPS * LEAST_SCALE)
                largest = [maximum(b, highest(of_row), least) for of_row in results]
                steps = [b.fdiv(splat(MOST_WEIGHT_STEPS), x) for x in largest]
                results = [[b.fmul(x, by) for x in of_row] for of_row, by in zip(results, steps, strict=True)]
                for number, x in zip(rows, largest, strict=True):
                    store(b.fmul(x, splat(1 / MOST_WEIGHT_STEPS)), weight_scales, number)
            for index, of_row in zip(indices, results, strict=True):
                to = b.gep(weights, [INT(index * KEY_BLOCK // of.terms)])
                for number, vector in enumerate(of.of_floats(b, of_row)):
                    store_vector(b, vector, b.gep(to, [INT(number * LANES)]))

        def emit_count(count: int) -> None:
            for first_of_some in range(0, count, _SOFTMAX_ROWS):
                emit_rows(range(first_of_some, min(count, first_of_some + _SOFTMAX_ROWS)))

        for_each_choice(b, num_rows, range(1, ROWS_AT_ONCE + 1), emit_count)

    return callable_by_kernels(emit)
