"""How native attention reads the keys, or the values, of a block: in the pages, or unpacked from them.

Pages in float32 are read in place. Other types, which need half or a quarter of the memory bandwidth, are converted to
floats: for a narrow tile when they are loaded into registers, since it uses each once; for a wide tile a block at a
time, which stays in the cache for all rows. The type is known when code is generated: there are no branches on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from microturn.model.cpu.vectors import (
    INT,
    LANES,
    Values,
    broadcast,
    callable_by_kernels,
    fetch,
    loop,
    widen,
)

_CACHE_LINE_BYTES = 64


class Source(NamedTuple):
    """Five arguments of a function: a block's keys, each [head_dim].

    Attributes:
        pages: all of them, flat: float32, bfloat16 as the int16 of its bits, or int8.
        block: float32 [keys, head_dim], what `unpack` writes.
        key_at: per key of the block, index of its first element in `pages`.
        shift: offset from there to the elements: to the values, or 0.
        head_dim: elements of a key.
    """

    pages: ir.Value
    block: ir.Value
    key_at: ir.Value
    shift: ir.Value
    head_dim: ir.Value

    @property
    def has_floats(self) -> bool:
        """Whether the pages are float32 and read in place."""
        return isinstance(self.pages.type.pointee, ir.FloatType)

    @property
    def has_scales(self) -> bool:
        """Whether the pages have scales."""
        return not self.has_floats and bool(self.pages.type.pointee.width == 8)

    @property
    def line_len(self) -> int:
        """Elements of the pages in a cache line."""
        return _CACHE_LINE_BYTES // (4 if self.has_floats else self.pages.type.pointee.width // 8)

    def at(self, b: ir.IRBuilder, key: ir.Value) -> ir.Value:
        """Index in the pages of a key of the block."""
        return b.add(b.load(b.gep(self.key_at, [key])), self.shift)

    def stored(self, b: ir.IRBuilder, key: ir.Value) -> ir.Value:
        """Address in the pages."""
        return b.gep(self.pages, [self.at(b, key)])

    def floats(self, b: ir.IRBuilder, key: ir.Value) -> ir.Value:
        """Address to compute from."""
        return self.stored(b, key) if self.has_floats else b.gep(self.block, [b.mul(key, self.head_dim)])

    def scale(self, b: ir.IRBuilder, scales: ir.Value, key: ir.Value) -> ir.Value | None:
        """The scale of a key; `scales` has one per `head_dim` elements of the pages."""
        return b.load(b.gep(scales, [b.udiv(self.at(b, key), self.head_dim)])) if self.has_scales else None

    def to_floats(self, b: ir.IRBuilder, address: ir.Value, scale: ir.Value | None, lanes: int = LANES) -> ir.Value:
        """Loads elements of a key in the pages as floats."""
        numbers = widen(b, address, lanes)
        return numbers if scale is None else b.fmul(numbers, broadcast(b, scale, lanes))


def unpack() -> Any:
    """Makes ``(*source, scales, num_keys)``: writes the floats of a block, unless the pages are float32."""

    def emit(b: ir.IRBuilder, *args: ir.Value) -> None:
        source, (scales, num_keys) = Source(*args[:5]), args[5:]
        if source.has_floats:
            return
        num_vectors, num_rest = (divide(source.head_dim, INT(LANES)) for divide in (b.udiv, b.urem))
        whole = b.mul(num_vectors, INT(LANES))

        def unpack_key(key: ir.Value, _: Values) -> Values:
            stored, floats = source.stored(b, key), source.floats(b, key)
            scale = source.scale(b, scales, key)

            def unpack_elements(first: ir.Value, lanes: int) -> Values:
                numbers = source.to_floats(b, b.gep(stored, [first]), scale, lanes)
                b.store(numbers, b.bitcast(b.gep(floats, [first]), numbers.type.as_pointer()), align=4)
                return []

            with b.if_then(b.icmp_signed(">", num_vectors, INT(0))):
                loop(b, num_vectors, [], lambda index, _: unpack_elements(b.mul(index, INT(LANES)), LANES))
            with b.if_then(b.icmp_signed(">", num_rest, INT(0))):
                loop(b, num_rest, [], lambda index, _: unpack_elements(b.add(whole, index), 1))
            return []

        loop(b, num_keys, [], unpack_key)

    return callable_by_kernels(emit)


def prefetch() -> Any:
    """Makes ``(*source, first_key, num_keys)``: prefetches these keys from the pages."""

    def emit(b: ir.IRBuilder, *args: ir.Value) -> None:
        source, (first_key, num_keys) = Source(*args[:5]), args[5:]
        pair_len = 2 * source.line_len  # the hardware fetches pairs of lines anyway
        num_pairs = b.udiv(b.add(source.head_dim, INT(pair_len - 1)), INT(pair_len))

        def fetch_key(index: ir.Value, _: Values) -> Values:
            start = source.stored(b, b.add(first_key, index))

            def fetch_pair(pair: ir.Value, _: Values) -> Values:
                first = b.gep(start, [b.mul(pair, INT(pair_len))])
                fetch(b, first)
                fetch(b, b.gep(first, [INT(source.line_len)]))
                return []

            return loop(b, num_pairs, [], fetch_pair)

        loop(b, num_keys, [], fetch_key)

    return callable_by_kernels(emit)
