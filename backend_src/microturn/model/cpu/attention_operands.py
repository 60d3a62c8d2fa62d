"""The operands of native attention's products: floats, or pairs of bfloat16 where the CPU multiplies those.

A *lane* has 32 bits. With AVX512-BF16 an instruction multiplies the two elements of a lane with those of another and
adds both products to a float, which reads half the bytes and does twice the work of a float's multiply-add. There
pages of 16 and 8 bits are attended in pairs: their elements are exact (8-bit integers have few enough bits, and their
scales are applied to scores and weights), queries and weights are rounded to bfloat16. Pages in float32, and all pages
on other CPUs, are attended in floats.

The type is known when code is generated: panels of floats are float32 arrays, those of pairs int32 arrays.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from microturn.model.cpu.vectors import CPU_FEATURES, HAS_AVX512, LANES, broadcast, multiply_add, widen

MAX_TERMS = 2
HAS_BFLOAT16 = HAS_AVX512 and "+avx512bf16" in CPU_FEATURES

_FLOAT, _INT32, _INT16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_WIDE, _HALVES = ir.VectorType(_INT32, 2 * LANES), ir.VectorType(_INT16, 2 * LANES)


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
LANE_VECTORS = {False: _FLOATS, True: ir.VectorType(_INT32, LANES)}


def operands_of(pages: NDArray[np.generic]) -> NDArray[np.generic]:
    """An empty array of the lanes in which pages are attended: float32, or int32 for pairs."""
    return np.empty(0, np.int32 if HAS_BFLOAT16 and pages.dtype != np.float32 else np.float32)


def are_pairs(lanes: ir.Value) -> bool:
    """Whether an array has pairs."""
    return bool(lanes.type.pointee == _INT32)


def num_terms(*, pairs: bool) -> int:
    """Elements of a lane."""
    return MAX_TERMS if pairs else 1


def to_lanes(b: ir.IRBuilder, elements: ir.Value, *, pairs: bool) -> ir.Value:
    """A vector of the pages' elements, as many as LANES lanes have, as these lanes."""
    kind = elements.type.element
    if not pairs:
        return widen(b, elements)
    if kind == _INT16:
        return b.bitcast(elements, LANE_VECTORS[True])
    # All bits of the floats that these integers are lie in the upper halves.
    bits = b.bitcast(widen(b, elements), _WIDE)
    return b.bitcast(b.trunc(b.lshr(bits, _WIDE([16] * (2 * LANES))), _HALVES), LANE_VECTORS[True])


def round_to_pairs(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """The lanes of 2 * LANES consecutive floats, rounded to even."""
    kind = ir.FunctionType(_PAIRS, [_FLOATS, _FLOATS])
    convert = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    return b.bitcast(b.call(convert, [high, low]), LANE_VECTORS[True])


def repeated(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Loads one lane into all."""
    return broadcast(b, b.load(address))


def add_dot(b: ir.IRBuilder, x: ir.Value, y: ir.Value, total: ir.Value) -> ir.Value:
    """Total + x * y in each lane."""
    if x.type == _FLOATS:
        return multiply_add(b, x, y, total)
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS])
    dot = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
    return b.call(dot, [total, b.bitcast(x, _PAIRS), b.bitcast(y, _PAIRS)])
