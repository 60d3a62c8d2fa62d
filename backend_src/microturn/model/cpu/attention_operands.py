"""How native attention multiplies pages of each type.

A *lane* has 32 bits: a float, or a pair of elements. An instruction multiplies the two elements of a lane with those of
another and adds both products to the lane's sum, which reads half the bytes and does twice the work of a float's
multiply-add.

* Pages in float32 are multiplied as floats.
* Pages in bfloat16 are multiplied as pairs of bfloat16 on a CPU with AVX512-BF16: queries and weights are rounded to
  bfloat16, sums are floats. On other CPUs they are multiplied as floats.
* Pages in int8 are multiplied as pairs of 16-bit integers, which every x86 CPU can: queries and weights are rounded to
  16-bit integers times a scale of their row, sums are exact.

The type is known when code is generated: arrays of floats are float32, those of pairs int32, a lane each.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from microturn.model.cpu.vectors import CPU_FEATURES, HAS_AVX512, LANES, Values, add_products, broadcast, multiply_add

MAX_TERMS = 2
HAS_BFLOAT16 = HAS_AVX512 and "+avx512bf16" in CPU_FEATURES

# The largest integer of a weight: no sum over a block of keys exceeds 32 bits. Also of a query, unless heads are huge.
MOST_WEIGHT_STEPS = 2**15 - 1

_FLOAT, _INT32, _INT16, _INT8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)
_HALVES, _WIDE = ir.VectorType(_INT16, 2 * LANES), ir.VectorType(_INT32, 2 * LANES)
_SIXTEEN, _UPPER_HALF, _LOWER_HALF = (_INTS([value] * LANES) for value in (16, 0xFFFF0000, 0xFFFF))


# llvmlite is untyped.
class _BFloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)


class Operands:
    """Pages in float32, and what all kinds share.

    Attributes:
        page_terms: elements that lie together in a panel; see `kv.page_layout`.
        terms: elements of a lane.
        zeros: of the sums of LANES lanes.
    """

    page_terms = 1
    terms = 1
    zeros = _FLOATS([0.0] * LANES)

    def of_pages(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        """A vector of a panel's elements, LANES times `page_terms`, as vectors of lanes: of each term, or of pairs."""
        return [elements]

    def of_floats(self, b: ir.IRBuilder, vectors: Values) -> Values:
        """Consecutive floats, a multiple of MAX_TERMS vectors, as vectors of lanes."""
        return vectors

    def first_terms(self, b: ir.IRBuilder, operands: Values) -> Values:
        """What `of_pages` made without the second of each two terms."""
        return operands[:1]

    def add(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
        """Total + x * y in each lane."""
        return multiply_add(b, x, y, total)

    def floats(self, b: ir.IRBuilder, sums: ir.Value, scale: ir.Value) -> ir.Value:
        """Sums as floats, times the scale of their row's integers."""
        return sums


class _BFloat16AsFloats(Operands):
    """Pages in bfloat16, as floats."""

    page_terms = 2

    def of_pages(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        lanes = b.bitcast(elements, _INTS)
        return [b.bitcast(part, _FLOATS) for part in (b.shl(lanes, _SIXTEEN), b.and_(lanes, _UPPER_HALF))]


class _BFloat16Pairs(Operands):
    """Pages in bfloat16, as pairs."""

    page_terms = terms = 2

    def of_pages(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        return [b.bitcast(elements, _INTS)]

    def of_floats(self, b: ir.IRBuilder, vectors: Values) -> Values:
        kind = ir.FunctionType(_PAIRS, [_FLOATS, _FLOATS])
        convert = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        return [b.bitcast(b.call(convert, [high, low]), _INTS) for low, high in pairs]

    def first_terms(self, b: ir.IRBuilder, operands: Values) -> Values:
        return [b.and_(operands[0], _LOWER_HALF)]

    def add(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        dot = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return b.call(dot, [total, b.bitcast(x, _PAIRS), b.bitcast(y, _PAIRS)])


class _IntegerPairs(_BFloat16Pairs):
    """Pages in int8, as pairs of 16-bit integers."""

    zeros = _INTS([0] * LANES)

    def of_pages(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        return [b.bitcast(b.sext(elements, _HALVES), _INTS)]

    def of_floats(self, b: ir.IRBuilder, vectors: Values) -> Values:
        """Floats that are integers, but for a fraction that is rounded."""
        round_all = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(_FLOATS, [_FLOATS]), f"llvm.rint.v{LANES}f32"
        )
        ints = [b.fptosi(b.call(round_all, [vector]), _INTS) for vector in vectors]
        lanes = list(range(2 * LANES))
        both = [b.shuffle_vector(*two, _WIDE(lanes)) for two in zip(ints[::2], ints[1::2], strict=True)]
        return [b.bitcast(b.trunc(vector, _HALVES), _INTS) for vector in both]

    def add(self, b: ir.IRBuilder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
        return add_products(b, b.bitcast(x, _HALVES), b.bitcast(y, _HALVES), total)

    def floats(self, b: ir.IRBuilder, sums: ir.Value, scale: ir.Value) -> ir.Value:
        return b.fmul(b.sitofp(sums, _FLOATS), scale)


def operands_of(pages: ir.Value) -> Operands:
    """How pages are multiplied: float32, bfloat16 as the int16 of its bits, or int8."""
    kind = pages.type.pointee
    if kind == _INT8:
        return _IntegerPairs()
    if kind == _INT16:
        return _BFloat16Pairs() if HAS_BFLOAT16 else _BFloat16AsFloats()
    assert isinstance(kind, ir.FloatType), f"pages of {kind}"
    return Operands()


def lanes_of(pages: NDArray[np.generic]) -> tuple[NDArray[np.generic], int]:
    """An empty array of the type of lanes in which pages are multiplied, and how many elements a lane has."""
    if pages.dtype == np.int8 or (pages.dtype == np.int16 and HAS_BFLOAT16):
        return np.empty(0, np.int32), MAX_TERMS
    return np.empty(0, np.float32), 1


def repeated(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads one lane into all."""
    return broadcast(b, b.load(address))
