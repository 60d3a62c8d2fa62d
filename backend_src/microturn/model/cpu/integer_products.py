"""Products of integers, added in lanes of 32 bits: of pairs of 16 bits, or of four bytes."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils

from microturn.model.cpu.vectors import CPU_FEATURES, HAS_AVX512, LANES

# Whether the products of four neighbouring bytes are added at once, with 32 bits for their sum.
HAS_VNNI = HAS_AVX512 and "+avx512vnni" in CPU_FEATURES

# The function that adds the products of two neighbouring bytes, with 16 bits for their sum, and what a CPU has with it.
_PAIRS_FEATURE, _PAIRS_FUNCTION = (
    ("+avx512bw", "llvm.x86.avx512.pmaddubs.w.512") if HAS_AVX512 else ("+avx2", "llvm.x86.avx2.pmadd.ub.sw")
)

# Added to the bytes of a factor, which have no sign then.
UNSIGNED_OFFSET = 128

_INT32, _INT16 = ir.IntType(32), ir.IntType(16)
_INT_VECTOR, _HALVES = ir.VectorType(_INT32, LANES), ir.VectorType(_INT16, 2 * LANES)


def add_products(b: ir.IRBuilder, x: ir.Value, y: ir.Value, sums: ir.Value) -> ir.Value:
    """Adds the products of two neighbouring integers to the sum of their lane.

    Args:
        x: 2 * LANES integers of at most 16 bits; `y` likewise.
        sums: LANES int32.
    """
    wide = ir.VectorType(_INT32, 2 * LANES)
    # LLVM has an instruction for just that.
    return b.add(sums, sums_of_neighbours(b, b.mul(b.sext(x, wide), b.sext(y, wide))))


def add_products_of_bytes(b: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value, sums: ir.Value) -> ir.Value:
    """Adds the products of four neighbouring bytes to the sum of their lane.

    Args:
        unsigned: 4 * LANES bytes; `signed` likewise, which are from -128 on. On a CPU without VNNI two neighbours'
            products have a sum of at most 16 bits.
        sums: LANES int32.
    """
    if not HAS_VNNI:
        return add_products(b, _sums_of_pairs(b, unsigned, signed), _HALVES([1] * 2 * LANES), sums)
    kind = ir.FunctionType(_INT_VECTOR, [_INT_VECTOR, unsigned.type, signed.type])
    add = cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}")
    return b.call(add, [sums, unsigned, signed])


def _sums_of_pairs(b: ir.IRBuilder, unsigned: ir.Value, signed: ir.Value) -> ir.Value:
    """The sums of the products of two neighbouring bytes, as 16-bit integers."""
    if _PAIRS_FEATURE in CPU_FEATURES:
        kind = ir.FunctionType(_HALVES, [unsigned.type, signed.type])
        return b.call(cgutils.get_or_insert_function(b.module, kind, _PAIRS_FUNCTION), [unsigned, signed])
    wide = ir.VectorType(_INT16, 4 * LANES)
    products = b.mul(b.zext(unsigned, wide), b.sext(signed, wide))
    parts = [ir.VectorType(_INT32, 2 * LANES)([2 * lane + place for lane in range(2 * LANES)]) for place in (0, 1)]
    return b.add(*(b.shuffle_vector(products, wide(ir.Undefined), part) for part in parts))


def sums_of_neighbours(b: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """LANES sums of two neighbours of 2 * LANES int32."""
    even, odd = (_INT_VECTOR([2 * lane + place for lane in range(LANES)]) for place in (0, 1))
    nothing = vector.type(ir.Undefined)
    return b.add(b.shuffle_vector(vector, nothing, even), b.shuffle_vector(vector, nothing, odd))
