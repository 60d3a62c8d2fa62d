"""Keys and values as native attention reads them: from the panels of their pages (see `kv.page_layout`), in place.

A *vector of keys* has LANES neighbouring keys of a page. Its lanes lie `stride` elements apart: the first element, or
pair or four of elements, of all of them, then the next. Values are read by *places*: as many tokens as have elements
that lie together. So a panel is read from its beginning to its end, while what is needed next is prefetched: into L2,
since two blocks of all heads are more than L1 holds, and since CPUs have more lines under way to L2.

A CPU drops a prefetch for which it has no room: Zen 4 takes them at 200 GB/s where its memory gives a core 25. So a
block is prefetched evenly, while all that lies before it is computed: three of its four groups of PANEL_TOKENS tokens
by the products, the last one by the softmax. When the products alone prefetched, the memory had nothing to do during
the softmax and was asked for too much around it, and attention took 1.1 to 1.2 times as long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from microturn.kv.page_layout import PANEL_TOKENS
from microturn.model.cpu.attention_operands import MAX_TERMS, operands_of
from microturn.model.cpu.vectors import (
    INT,
    L2,
    LANES,
    Values,
    callable_by_kernels,
    fetch,
    load_vector,
    loop,
    store_vector,
)

# Keys of a block: scores of a row are four vectors with AVX-512.
KEY_BLOCK = 64
NUM_KEY_VECTORS = KEY_BLOCK // LANES

# The vectors of a block with which its groups of PANEL_TOKENS tokens begin: a lane of a group is a cache line.
_GROUPS = range(0, NUM_KEY_VECTORS, PANEL_TOKENS // LANES)


class Block(NamedTuple):
    """Five arguments of a function: one head's keys and values of a block.

    Attributes:
        pages: all of them, flat: float32, bfloat16 as the int16 of its bits, or int8.
        at: int64 [3 * NUM_KEY_VECTORS], for each vector of keys the indices of its first element, of the first element
            of its values, and of its first scale, one kind behind another, all of the first head of several.
        to_head: elements from there to the head's, of keys and of values.
        stride: elements between the lanes of a vector of keys.
        value_stride: elements between the places of values.
    """

    pages: ir.Value
    at: ir.Value
    to_head: ir.Value
    stride: ir.Value
    value_stride: ir.Value

    def key_address(self, b: ir.IRBuilder, vector: int, lane: ir.Value) -> ir.Value:
        """Of a lane's elements of all keys of a vector."""
        start = self._start(b, INT(vector))
        return b.gep(self.pages, [b.add(start, b.mul(lane, self.stride))])

    def value_address(self, b: ir.IRBuilder, place: ir.Value) -> ir.Value:
        """Of the first elements at a place."""
        places = LANES // operands_of(self.pages).page_terms
        start = self._start(b, b.add(INT(NUM_KEY_VECTORS), b.udiv(place, INT(places))))
        return b.gep(self.pages, [b.add(start, b.mul(b.urem(place, INT(places)), self.value_stride))])

    def scales_of(self, b: ir.IRBuilder, scales: ir.Value, vector: int, offset: ir.Value) -> ir.Value:
        """The scales `offset` behind those of a vector of the first head's keys: of the head's keys, or its values."""
        start = b.load(b.gep(self.at, [INT(2 * NUM_KEY_VECTORS + vector)]))
        return load_vector(b, b.gep(scales, [b.add(start, offset)]), LANES)

    def fetch_keys(self, b: ir.IRBuilder, lane: ir.Value) -> None:
        """Prefetches a lane of the keys of all `_GROUPS` but the last, a cache line of each."""
        for group in _GROUPS[:-1]:
            self._fetch_keys(b, group, lane)

    def fetch_values(self, b: ir.IRBuilder, lane: ir.Value) -> None:
        """Prefetches as much of the values as `fetch_keys` of the keys."""
        for group in _GROUPS[:-1]:
            self._fetch_values(b, group, lane)

    def fetch_last(self, b: ir.IRBuilder, lane: ir.Value) -> None:
        """Prefetches a lane of the last group's keys, and as much of its values."""
        self._fetch_keys(b, _GROUPS[-1], lane)
        self._fetch_values(b, _GROUPS[-1], lane)

    def _fetch_keys(self, b: ir.IRBuilder, group: int, lane: ir.Value) -> None:
        fetch(b, self.key_address(b, group, lane), L2)

    def _fetch_values(self, b: ir.IRBuilder, group: int, lane: ir.Value) -> None:
        """Values of a group lie one behind another, whatever else their page has."""
        line = INT(PANEL_TOKENS * operands_of(self.pages).page_terms)
        start = self._start(b, INT(NUM_KEY_VECTORS + group))
        fetch(b, b.gep(self.pages, [b.add(start, b.mul(lane, line))]), L2)

    def _start(self, b: ir.IRBuilder, index: ir.Value) -> ir.Value:
        """Where a vector of keys begins, or its values."""
        return b.add(b.load(b.gep(self.at, [index])), self.to_head)


def prefetch_scales() -> Any:
    """Makes ``(pages, at, scales, to_keys, to_values)``: prefetches the scales of a block, if its pages have any.

    The last two are offsets as in `Block.scales_of`.
    """

    def emit(b: ir.IRBuilder, pages: ir.Value, at: ir.Value, scales: ir.Value, *offsets: ir.Value) -> None:
        if not operands_of(pages).are_integers:
            return
        for group in _GROUPS:
            start = b.load(b.gep(at, [INT(2 * NUM_KEY_VECTORS + group)]))
            for offset in offsets:
                fetch(b, b.gep(scales, [b.add(start, offset)]), L2)

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
