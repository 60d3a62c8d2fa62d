"""Panels: a block of keys or values, copied from its pages in the order in which the products read it.

* Keys: ``panel[lane of a head, key]``. A vector has the same elements of LANES keys, so that scores of LANES keys are
  added in its lanes, and never across them.
* Values: ``panel[key, element]``, or with pairs ``panel[pair of keys, element]``, whose lanes have the elements of two
  neighbouring keys.

Copying takes a key some ten instructions per vector, once for all rows of a tile, and needs no memory bandwidth: a
panel stays in the cache. Functions get ``pages, key_at``: all pages, flat (float32, bfloat16 as the int16 of its bits,
or int8), and per key of the block the index of its first element.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from microturn.model.cpu.attention_operands import LANE_VECTORS, are_pairs, num_terms, round_to_pairs, to_lanes
from microturn.model.cpu.vectors import (
    INT,
    LANES,
    Values,
    callable_by_kernels,
    fetch,
    interleaved,
    load_first,
    load_vector,
    loop,
    loop_any,
    store_vector,
    transposed,
)

# Keys of a block: scores of a row are four vectors with AVX-512, and both panels together take 16 KiB as pairs.
KEY_BLOCK = 64

_CACHE_LINE_BYTES = 64


def pack_keys() -> Any:
    """Makes ``(pages, key_at, head_dim, num_keys, panel)``: panel [lanes of a head, KEY_BLOCK].

    Elements behind a head are 0; columns behind the last vector with a key are not written.
    """

    def emit(b: ir.IRBuilder, pages: ir.Value, key_at: ir.Value, *args: ir.Value) -> None:
        head_dim, num_keys, panel = args
        pairs = are_pairs(panel)
        step = LANES * num_terms(pairs=pairs)

        def pack_vector_of_keys(group: ir.Value, _: Values) -> Values:
            first = b.mul(group, INT(LANES))
            starts = [b.gep(pages, [b.load(b.gep(key_at, [b.add(first, INT(t))]))]) for t in range(LANES)]

            def pack(number: ir.Value, count: ir.Value | None) -> Values:
                rows = [to_lanes(b, _elements(b, start, number, step, count), pairs=pairs) for start in starts]
                for lane, column in enumerate(transposed(b, rows)):
                    row = b.add(b.mul(number, INT(LANES)), INT(lane))
                    store_vector(b, column, b.gep(panel, [b.add(b.mul(row, INT(KEY_BLOCK)), first)]))
                return []

            _for_elements(b, head_dim, step, pack)
            return []

        loop(b, b.udiv(b.add(num_keys, INT(LANES - 1)), INT(LANES)), [], pack_vector_of_keys)

    return callable_by_kernels(emit)


def pack_values() -> Any:
    """Makes ``(pages, key_at, shift, head_dim, num_keys, panel, padded_dim)``.

    The panel is [keys or their pairs, padded_dim]; elements behind a head are 0. The values of a key begin `shift`
    elements behind its key. Where the number of keys is odd, the last pair has what `key_at` says next.
    """

    def emit(b: ir.IRBuilder, pages: ir.Value, key_at: ir.Value, shift: ir.Value, *args: ir.Value) -> None:
        head_dim, num_keys, panel, padded_dim = args
        pairs = are_pairs(panel)
        terms = num_terms(pairs=pairs)
        step = LANES * terms

        def pack_lanes(index: ir.Value, _: Values) -> Values:
            keys = [b.add(b.mul(index, INT(terms)), INT(t)) for t in range(terms)]
            starts = [b.gep(pages, [b.add(b.load(b.gep(key_at, [key])), shift)]) for key in keys]
            to = b.gep(panel, [b.mul(index, padded_dim)])

            def pack(number: ir.Value, count: ir.Value | None) -> Values:
                rows = [to_lanes(b, _elements(b, start, number, step, count), pairs=pairs) for start in starts]
                vectors = interleaved(b, *rows) if pairs else rows
                for part, vector in enumerate(vectors):
                    at = b.add(b.mul(number, INT(step)), INT(part * LANES))
                    store_vector(b, vector, b.gep(to, [at]))
                return []

            _for_elements(b, head_dim, step, pack)
            return []

        loop(b, b.udiv(b.add(num_keys, INT(terms - 1)), INT(terms)), [], pack_lanes)

    return callable_by_kernels(emit)


def pack_queries() -> Any:
    """Makes ``(floats, lanes, num_floats)``: a multiple of LANES * 2 floats as operands."""

    def emit(b: ir.IRBuilder, floats: ir.Value, lanes: ir.Value, num_floats: ir.Value) -> None:
        pairs = are_pairs(lanes)
        terms = num_terms(pairs=pairs)

        def pack(index: ir.Value, _: Values) -> Values:
            at = b.mul(index, INT(LANES * terms))
            parts = [load_vector(b, b.gep(floats, [b.add(at, INT(part * LANES))]), LANES) for part in range(terms)]
            vector = round_to_pairs(b, *parts) if pairs else parts[0]
            store_vector(b, vector, b.gep(lanes, [b.mul(index, INT(LANES))]))
            return []

        loop(b, b.udiv(num_floats, INT(LANES * terms)), [], pack)

    return callable_by_kernels(emit)


def prefetch() -> Any:
    """Makes ``(pages, key_at, shift, head_dim, num_keys)``: prefetches keys, or their values `shift` elements behind."""

    def emit(b: ir.IRBuilder, pages: ir.Value, key_at: ir.Value, *args: ir.Value) -> None:
        shift, head_dim, num_keys = args
        kind = pages.type.pointee
        line_len = _CACHE_LINE_BYTES // (4 if isinstance(kind, ir.FloatType) else kind.width // 8)
        num_lines = b.udiv(b.add(head_dim, INT(line_len - 1)), INT(line_len))

        def fetch_key(key: ir.Value, _: Values) -> Values:
            start = b.gep(pages, [b.add(b.load(b.gep(key_at, [key])), shift)])

            def fetch_line(line: ir.Value, _: Values) -> Values:
                fetch(b, b.gep(start, [b.mul(line, INT(line_len))]))
                return []

            return loop(b, num_lines, [], fetch_line)

        loop_any(b, num_keys, fetch_key)

    return callable_by_kernels(emit)


def _for_elements(b: ir.IRBuilder, head_dim: ir.Value, step: int, body: Any) -> None:
    """``body(number, None)`` for each `step` elements of a head, and ``body(number, count)`` for fewer at its end."""
    whole, rest = b.udiv(head_dim, INT(step)), b.urem(head_dim, INT(step))
    loop_any(b, whole, lambda number, _: body(number, None))
    with b.if_then(b.icmp_signed(">", rest, INT(0))):
        body(whole, rest)


def _elements(b: ir.IRBuilder, start: ir.Value, number: ir.Value, step: int, count: ir.Value | None) -> ir.Value:
    """Elements of a head in the pages' type, the first `count` of them and zeros, or all."""
    address = b.gep(start, [b.mul(number, INT(step))])
    return load_vector(b, address, step) if count is None else load_first(b, address, step, count)
