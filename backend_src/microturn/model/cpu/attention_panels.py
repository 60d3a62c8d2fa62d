"""Panels: a block of keys or values, copied from its pages in the order in which the products read it.

* Keys: ``panel[lane of a head, key]``. A vector has the same elements of LANES keys, so that scores of LANES keys are
  added in its lanes, and never across them.
* Values: ``panel[key, element]``, or with pairs ``panel[pair of keys, element]``, whose lanes have the elements of two
  neighbouring keys.

Copying takes a key some ten instructions per vector, once for all rows of a tile, and needs no memory bandwidth: a
panel stays in the cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from microturn.model.cpu.attention_operands import are_pairs, num_terms, round_to_pairs, to_lanes
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


class Keys(NamedTuple):
    """Three arguments of a function: the keys of a block, or their values.

    Attributes:
        pages: all of them, flat: float32, bfloat16 as the int16 of its bits, or int8.
        at: per key its index, counted in heads: its first element is ``pages[at[key] * head_dim]``.
        head_dim: elements of a key.
    """

    pages: ir.Value
    at: ir.Value
    head_dim: ir.Value

    def start(self, b: ir.IRBuilder, key: ir.Value) -> ir.Value:
        """Address of a key's first element."""
        return b.gep(self.pages, [b.mul(b.load(b.gep(self.at, [key])), self.head_dim)])


class Ahead(NamedTuple):
    """Five arguments of a function: keys that it prefetches while it computes, since it does not wait for them.

    A burst of prefetches would: a core has few outstanding loads.

    Attributes:
        pages: as in `Keys`; `at` and `head_dim` likewise.
        first: index of the first key in `at`.
        last: index of the last key; more are not fetched.
    """

    pages: ir.Value
    at: ir.Value
    head_dim: ir.Value
    first: ir.Value
    last: ir.Value

    def fetch(self, b: ir.IRBuilder, number: ir.Value) -> None:
        """Prefetches the key behind `number` others, or the last one once more."""
        key = b.add(self.first, number)
        key = b.select(b.icmp_signed("<", key, self.last), key, self.last)
        start = Keys(self.pages, self.at, self.head_dim).start(b, key)
        kind = self.pages.type.pointee
        line_len = _CACHE_LINE_BYTES // (4 if isinstance(kind, ir.FloatType) else kind.width // 8)
        num_lines = b.udiv(b.add(self.head_dim, INT(line_len - 1)), INT(line_len))

        def fetch_line(line: ir.Value, _: Values) -> Values:
            fetch(b, b.gep(start, [b.mul(line, INT(line_len))]))
            return []

        loop(b, num_lines, [], fetch_line)


def pack_keys() -> Any:
    """Makes ``(*keys, num_keys, panel, *ahead)``: panel [lanes of a head, KEY_BLOCK]; fetches half a block ahead.

    Elements behind a head are 0; columns behind the last vector with a key are not written.
    """

    def emit(b: ir.IRBuilder, *args: ir.Value) -> None:
        keys, (num_keys, panel), ahead = Keys(*args[:3]), args[3:5], Ahead(*args[5:])
        pairs = are_pairs(panel)
        step = LANES * num_terms(pairs=pairs)

        def pack_vector_of_keys(group: ir.Value, _: Values) -> Values:
            first = b.mul(group, INT(LANES))
            starts = [keys.start(b, b.add(first, INT(t))) for t in range(LANES)]
            for t in range(LANES // 2):
                ahead.fetch(b, b.add(b.mul(group, INT(LANES // 2)), INT(t)))

            def pack(number: ir.Value, count: ir.Value | None) -> Values:
                rows = [to_lanes(b, _elements(b, start, number, step, count), pairs=pairs) for start in starts]
                for lane, column in enumerate(transposed(b, rows)):
                    row = b.add(b.mul(number, INT(LANES)), INT(lane))
                    store_vector(b, column, b.gep(panel, [b.add(b.mul(row, INT(KEY_BLOCK)), first)]))
                return []

            _for_elements(b, keys.head_dim, step, pack)
            return []

        loop(b, b.udiv(b.add(num_keys, INT(LANES - 1)), INT(LANES)), [], pack_vector_of_keys)

    return callable_by_kernels(emit)


def pack_values() -> Any:
    """Makes ``(*values, num_keys, panel, padded_dim, *ahead)``: fetches half a block ahead.

    The panel is [keys or their pairs, padded_dim]; elements behind a head are 0. Where the number of keys is odd, the
    last pair has the last key twice.
    """

    def emit(b: ir.IRBuilder, *args: ir.Value) -> None:
        values, (num_keys, panel, padded_dim), ahead = Keys(*args[:3]), args[3:6], Ahead(*args[6:])
        pairs = are_pairs(panel)
        terms = num_terms(pairs=pairs)
        step = LANES * terms

        def pack_lanes(index: ir.Value, _: Values) -> Values:
            places = [b.add(b.mul(index, INT(terms)), INT(t)) for t in range(terms)]
            last = b.sub(num_keys, INT(1))
            starts = [values.start(b, b.select(b.icmp_signed("<", at, last), at, last)) for at in places]
            ahead.fetch(b, b.udiv(b.mul(index, INT(terms)), INT(2)))
            to = b.gep(panel, [b.mul(index, padded_dim)])

            def pack(number: ir.Value, count: ir.Value | None) -> Values:
                rows = [to_lanes(b, _elements(b, start, number, step, count), pairs=pairs) for start in starts]
                vectors = interleaved(b, *rows) if pairs else rows
                for part, vector in enumerate(vectors):
                    at = b.add(b.mul(number, INT(step)), INT(part * LANES))
                    store_vector(b, vector, b.gep(to, [at]))
                return []

            _for_elements(b, values.head_dim, step, pack)
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
    """Makes ``(*keys, num_keys)``: prefetches some keys at once."""

    def emit(b: ir.IRBuilder, *args: ir.Value) -> None:
        pages, at, head_dim, num_keys = args
        ahead = Ahead(pages, at, head_dim, INT(0), b.sub(num_keys, INT(1)))

        def fetch_key(key: ir.Value, _: Values) -> Values:
            ahead.fetch(b, key)
            return []

        loop(b, num_keys, [], fetch_key)

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
