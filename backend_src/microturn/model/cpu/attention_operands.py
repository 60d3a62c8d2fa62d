"""How native attention multiplies pages of each type.

A *lane* has 32 bits: a float, a pair of elements, or four. An instruction multiplies the elements of a lane with those
of another and adds all products to the lane's sum, which reads a half or a quarter of the bytes and does twice or four
times the work of a float's multiply-add.

* Pages in float32 are multiplied as floats.
* Pages in bfloat16 are multiplied as pairs of bfloat16 on a CPU with AVX512-BF16: queries and weights are rounded to
  bfloat16, sums are floats. On other CPUs they are multiplied as floats.
* Pages in int8 are multiplied as integers, four bytes at once: queries are rounded to 8 bits times a scale of their
  row, weights to 8 bits without a sign times a scale of their row and block (as in SageAttention: Zhang et al., 2024),
  sums are exact. One factor of these products has no sign: `UNSIGNED_OFFSET` is added to keys, and what that adds to a
  row's scores is taken off. CPUs without VNNI add two products in 16 bits, into which they fit if queries and weights
  are rounded to 7 bits.

The type is known when code is generated: arrays of floats are float32, those of pairs or fours int32, a lane each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import overload, register_jitable
from numpy.typing import NDArray

from microturn.model.cpu.integer_products import HAS_VNNI, UNSIGNED_OFFSET, add_products_of_bytes
from microturn.model.cpu.vectors import CPU_FEATURES, HAS_AVX512, LANES, Values, broadcast, multiply_add, nearest_ints

MAX_TERMS = 4
HAS_BFLOAT16 = HAS_AVX512 and "+avx512bf16" in CPU_FEATURES

# The largest integers of a query and of a weight. Without VNNI 16 bits with a sign must hold 2 * 64 * 255, a query by
# keys, and 2 * 128 * -128, a weight by whatever memory holds.
MOST_QUERY_STEPS, MOST_WEIGHT_STEPS = (127, 255) if HAS_VNNI else (64, 128)

_FLOAT, _INT32, _INT8 = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)
_BYTES = ir.VectorType(_INT8, 4 * LANES)
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
        are_integers: whether products are of integers, of which a weight of 0 takes off whatever memory holds.
    """

    page_terms = 1
    terms = 1
    zeros = _FLOATS([0.0] * LANES)
    are_integers = False

    def of_keys(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        """A vector of a panel's elements, LANES times `page_terms`, as vectors of lanes: each term, or several."""
        return [elements]

    def of_values(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        """The same, for values."""
        return self.of_keys(b, elements)

    def of_floats(self, b: ir.IRBuilder, vectors: Values) -> Values:
        """Consecutive floats, a multiple of MAX_TERMS vectors, as vectors of lanes."""
        return vectors

    def first_terms(self, b: ir.IRBuilder, operands: Values) -> Values:
        """What `of_values` made without the second of each two terms."""
        return operands[:1]

    def add_keys(self, b: ir.IRBuilder, query: ir.Value, key: ir.Value, total: ir.Value) -> ir.Value:
        """Total + query * key in each lane."""
        return multiply_add(b, query, key, total)

    def add_values(self, b: ir.IRBuilder, weight: ir.Value, value: ir.Value, total: ir.Value) -> ir.Value:
        """Total + weight * value in each lane."""
        return self.add_keys(b, weight, value, total)

    def floats(self, b: ir.IRBuilder, sums: ir.Value, scale: ir.Value) -> ir.Value:
        """Sums as floats, times the scale of their row's integers."""
        return sums


class _BFloat16AsFloats(Operands):
    """Pages in bfloat16, as floats."""

    page_terms = 2

    def of_keys(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        lanes = b.bitcast(elements, _INTS)
        return [b.bitcast(part, _FLOATS) for part in (b.shl(lanes, _SIXTEEN), b.and_(lanes, _UPPER_HALF))]


class _BFloat16Pairs(Operands):
    """Pages in bfloat16, as pairs."""

    page_terms = terms = 2

    def of_keys(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        return [b.bitcast(elements, _INTS)]

    def of_floats(self, b: ir.IRBuilder, vectors: Values) -> Values:
        kind = ir.FunctionType(_PAIRS, [_FLOATS, _FLOATS])
        convert = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        return [b.bitcast(b.call(convert, [high, low]), _INTS) for low, high in pairs]

    def first_terms(self, b: ir.IRBuilder, operands: Values) -> Values:
        return [b.and_(operands[0], _LOWER_HALF)]

    def add_keys(self, b: ir.IRBuilder, query: ir.Value, key: ir.Value, total: ir.Value) -> ir.Value:
        kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
        dot = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        return b.call(dot, [total, b.bitcast(query, _PAIRS), b.bitcast(key, _PAIRS)])


class _Bytes(Operands):
    """Pages in int8, by four bytes."""

    page_terms = terms = 4
    zeros = _INTS([0] * LANES)
    are_integers = True

    def of_keys(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        return [b.bitcast(b.xor(elements, _BYTES([UNSIGNED_OFFSET] * 4 * LANES)), _INTS)]

    def of_values(self, b: ir.IRBuilder, elements: ir.Value) -> Values:
        return [b.bitcast(elements, _INTS)]

    def of_floats(self, b: ir.IRBuilder, vectors: Values) -> Values:
        """Floats that are integers, but for a fraction that is rounded."""
        return [b.bitcast(b.trunc(four, _BYTES), _INTS) for four in _fours(b, vectors)]

    def add_keys(self, b: ir.IRBuilder, query: ir.Value, key: ir.Value, total: ir.Value) -> ir.Value:
        return add_products_of_bytes(b, b.bitcast(key, _BYTES), b.bitcast(query, _BYTES), total)

    def add_values(self, b: ir.IRBuilder, weight: ir.Value, value: ir.Value, total: ir.Value) -> ir.Value:
        return add_products_of_bytes(b, b.bitcast(weight, _BYTES), b.bitcast(value, _BYTES), total)

    def floats(self, b: ir.IRBuilder, sums: ir.Value, scale: ir.Value) -> ir.Value:
        return b.fmul(b.sitofp(sums, _FLOATS), scale)


def _fours(b: ir.IRBuilder, vectors: Values) -> Values:
    """Floats, rounded to int32, four vectors as one."""
    ints = [nearest_ints(b, vector) for vector in vectors]
    return [_joined(b, ints[first : first + 4]) for first in range(0, len(ints), 4)]


def _joined(b: ir.IRBuilder, vectors: Values) -> ir.Value:
    """Vectors one behind another."""
    while len(vectors) > 1:
        lanes = ir.VectorType(_INT32, 2 * vectors[0].type.count)(list(range(2 * vectors[0].type.count)))
        vectors = [b.shuffle_vector(*two, lanes) for two in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def operands_of(pages: ir.Value) -> Operands:
    """How pages are multiplied: float32, bfloat16 as the int16 of its bits, or int8."""
    kind = pages.type.pointee
    return _operands(32 if isinstance(kind, ir.FloatType) else kind.width)


def _operands(bits: int) -> Operands:
    """Of pages whose elements have so many bits."""
    if bits == 8:
        return _Bytes()
    if bits == 16:
        return _BFloat16Pairs() if HAS_BFLOAT16 else _BFloat16AsFloats()
    assert bits == 32, f"elements of {bits} bits"
    return Operands()


def new_lanes(pages: NDArray[np.generic], num_elements: int) -> NDArray[np.generic]:
    """In kernels: an uninitialised array of lanes with so many elements, in which pages are multiplied."""
    raise NotImplementedError("only in kernels")


@overload(new_lanes)
def _new_lanes(pages: Any, num_elements: Any) -> Any:  # noqa: ARG001  Numba wants the same twice
    terms = _operands(pages.dtype.bitwidth).terms
    kind = np.float32 if terms == 1 else np.int32

    def made(pages: Any, num_elements: Any) -> Any:  # noqa: ARG001
        return np.empty(num_elements // terms, kind)

    return made


@register_jitable
def padded(head_dim: int) -> int:
    """Elements of a head's queries and sums in memory: whole vectors, as many as `Operands.of_floats` takes at once."""
    return head_dim + -head_dim % (MAX_TERMS * LANES)


def repeated(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads one lane into all."""
    return broadcast(b, b.load(address))
