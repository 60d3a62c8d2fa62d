"""Keys and values as native attention reads them: from the panels of their pages (see `kv.page_layout`), in place.

A *vector of keys* has LANES neighbouring keys of a page. Its lanes lie `stride` elements apart: the first element, or
pair or four of elements, of all of them, then the next. Values are read by *places*: as many tokens as have elements
that lie together. So a panel is read from its beginning to its end, while what is needed next is prefetched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from microturn.kv.page_layout import PANEL_TOKENS
from microturn.model.cpu.attention_operands import MAX_TERMS, operands_of
from microturn.model.cpu.vectors import INT, LANES, Values, callable_by_kernels, fetch, load_vector, loop, store_vector

# Keys of a block: scores of a row are four vectors with AVX-512.
KEY_BLOCK = 64
NUM_KEY_VECTORS = KEY_BLOCK // LANES


class Block(NamedTuple):
    """Four arguments of a function: a block of keys and their values.

    Attributes:
        pages: all of them, flat: float32, bfloat16 as the int16 of its bits, or int8.
        at: int64 [3 * NUM_KEY_VECTORS], for each vector of keys the indices of its first element, of the first element
            of its values, and of its first scale, one kind behind another.
        stride: elements between the lanes of a vector of keys.
        value_stride: elements between the places of values.
    """

    pages: ir.Value
    at: ir.Value
    stride: ir.Value
    value_stride: ir.Value

    def key_address(self, b: ir.IRBuilder, vector: int, lane: ir.Value) -> ir.Value:
        """Of a lane's elements of all keys of a vector."""
        start = b.load(b.gep(self.at, [INT(vector)]))
        return b.gep(self.pages, [b.add(start, b.mul(lane, self.stride))])

    def value_address(self, b: ir.IRBuilder, place: ir.Value) -> ir.Value:
        """Of the first elements at a place."""
        places = LANES // operands_of(self.pages).page_terms
        start = b.load(b.gep(self.at, [b.add(INT(NUM_KEY_VECTORS), b.udiv(place, INT(places)))]))
        return b.gep(self.pages, [b.add(start, b.mul(b.urem(place, INT(places)), self.value_stride))])

    def scales_of(self, b: ir.IRBuilder, scales: ir.Value, vector: int, offset: ir.Value) -> ir.Value:
        """The scales of a vector of keys, or those `offset` behind them: of its values."""
        start = b.load(b.gep(self.at, [INT(2 * NUM_KEY_VECTORS + vector)]))
        return load_vector(b, b.gep(scales, [b.add(start, offset)]), LANES)

    def fetch_keys(self, b: ir.IRBuilder, lane: ir.Value) -> None:
        """Prefetches a lane of all vectors, a cache line per page."""
        for vector in range(0, NUM_KEY_VECTORS, PANEL_TOKENS // LANES):
            fetch(b, self.key_address(b, vector, lane))

    def fetch_scales(self, b: ir.IRBuilder, scales: ir.Value, offset: ir.Value) -> None:
        """Prefetches the scales of the keys, and those of their values, `offset` behind them."""
        for vector in range(0, NUM_KEY_VECTORS, PANEL_TOKENS // LANES):
            start = b.load(b.gep(self.at, [INT(2 * NUM_KEY_VECTORS + vector)]))
            for at in (start, b.add(start, offset)):
                fetch(b, b.gep(scales, [at]))

    def fetch_values(self, b: ir.IRBuilder, lane: ir.Value) -> None:
        """Prefetches as much of the values as `fetch_keys` of the keys: a panel of either has as many elements."""
        for vector in range(0, NUM_KEY_VECTORS, PANEL_TOKENS // LANES):
            start = b.load(b.gep(self.at, [INT(NUM_KEY_VECTORS + vector)]))
            fetch(b, b.gep(self.pages, [b.add(start, b.mul(lane, self.stride))]))


def prefetch() -> Any:
    """Makes ``(*block, num_lanes)``: prefetches its keys at once."""

    def emit(b: ir.IRBuilder, *args: ir.Value) -> None:
        block, num_lanes = Block(*args[:4]), args[4]

        def fetch_lane(lane: ir.Value, _: Values) -> Values:
            block.fetch_keys(b, lane)
            return []

        loop(b, num_lanes, [], fetch_lane)

    return callable_by_kernels(emit)


def prefetch_scales() -> Any:
    """Makes ``(*block, scales, to_values)``: prefetches the scales of a block, if its pages have any."""

    def emit(b: ir.IRBuilder, *args: ir.Value) -> None:
        block, scales, to_values = Block(*args[:4]), *args[4:]
        if operands_of(block.pages).are_integers:
            block.fetch_scales(b, scales, to_values)

    return callable_by_kernels(emit)


def pack_queries() -> Any:
    """Makes ``(pages, floats, lanes, num_floats)``: LANES * MAX_TERMS floats, or several times as many, as operands."""

    def emit(b: ir.IRBuilder, pages: ir.Value, floats: ir.Value, lanes: ir.Value, num_floats: ir.Value) -> None:
        of = operands_of(pages)

        def pack(index: ir.Value, _: Values) -> Values:
            first = b.mul(index, INT(LANES * MAX_TERMS))
            given = [load_vector(b, b.gep(floats, [b.add(first, INT(n * LANES))]), LANES) for n in range(MAX_TERMS)]
            to = b.gep(lanes, [b.udiv(first, INT(of.terms))])
            for number, vector in enumerate(of.of_floats(b, given)):
                store_vector(b, vector, b.gep(to, [INT(number * LANES)]))
            return []

        loop(b, b.udiv(num_floats, INT(LANES * MAX_TERMS)), [], pack)

    return callable_by_kernels(emit)
