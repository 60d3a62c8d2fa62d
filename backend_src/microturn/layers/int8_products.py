"""The inner loop of products with 8-bit weights: a tile of integer sums, scaled.

Rows of weights are whole multiples of a scale of their own in 8 bits, rows of inputs in 16. Their products are added as
integers, so that neither the order of a sum nor the tiles change it: a row has the same result to the bit in any
company. Nothing saturates: two neighbours, widened to 16 bits, are multiplied and added up in 32 bits by an instruction
that every x86 CPU has, and `most_steps` keeps the whole sum within them.

All rows are padded with zeros to whole steps of `STEP` elements, and weights to whole blocks of `WEIGHT_ROWS` rows. A
block is read once, in order, while what comes behind it is fetched, as in `few_rows`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import config
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features

from microturn.attention.native_vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    callable_by_kernels,
    fetch,
    loop,
    split_runs,
)

_FEATURES = (config.CPU_FEATURES or get_host_cpu_features()).split(",")
HAS_VNNI = ("+avx512vnni" if HAS_AVX512 else "+avxvnni") in _FEATURES

STEP = 64
WEIGHT_ROWS = 4

# 4 x 4 or 4 x 2 vectors of sums fill half of the registers.
TILE_ROWS = 4 if HAS_AVX512 else 2

# Elements that one turn of the loop takes. VNNI adds to its sums in one instruction; for a second one behind it LLVM
# would take two again, so as not to wait.
_LOOP_LEN = 2 * LANES if HAS_VNNI else STEP

# Weights are fetched so many bytes ahead: two to four blocks of SmolLM2's.
_AHEAD = 4096

# Inputs of 16 bits have fewer steps than they could, so that they can be cut into two signed bytes.
_MOST_WEIGHT_STEPS, _MOST_INPUT_STEPS = 127, 127 * 256 + 127

_INT32, _FLOAT = ir.IntType(32), ir.FloatType()
_SUMS, _WIDE = ir.VectorType(_INT32, LANES), ir.VectorType(_INT32, 2 * LANES)
_INPUTS, _WEIGHTS = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.IntType(8), 2 * LANES)
_BLOCK_SUMS, _BLOCK_FLOATS = ir.VectorType(_INT32, WEIGHT_ROWS), ir.VectorType(_FLOAT, WEIGHT_ROWS)


def most_steps(width: int) -> int:
    """The largest input to be multiplied with weight rows of so many elements: no sum has more than 32 bits."""
    return min(_MOST_INPUT_STEPS, (2**31 - 1) // (_MOST_WEIGHT_STEPS * width))


def tile(num_rows: int) -> Any:
    """Makes ``(x, x_scales, row, weight, weight_scales, first, num_steps, out, num_out)``.

    It sets ``out[row : row + num_rows, first : first + WEIGHT_ROWS]``, as far as there are columns, to
    ``sum * weight_scale * x_scale``, multiplied in this order. Arrays are those of `int8_kernels.multiply`.
    """

    def emit(b: ir.IRBuilder, x: ir.Value, x_scales: ir.Value, row: ir.Value, *args: ir.Value) -> None:
        weight, weight_scales, first, num_steps, out, num_out = args
        width = b.mul(num_steps, INT(STEP))
        rows = [b.add(row, INT(index)) for index in range(num_rows)]
        inputs = [b.gep(x, [b.mul(index, width)]) for index in rows]
        weights = [b.gep(weight, [b.mul(b.add(first, INT(index)), width)]) for index in range(WEIGHT_ROWS)]

        def add_some(number: ir.Value, sums: Values) -> Values:
            start = b.mul(number, INT(_LOOP_LEN))
            for factor in weights:
                fetch(b, b.gep(factor, [b.add(start, INT(_AHEAD))]))
            for offset in range(0, _LOOP_LEN, 2 * LANES):
                at = b.add(start, INT(offset))
                given = [_load(b, vector, at, _INPUTS) for vector in inputs]
                factors = [_load(b, vector, at, _WEIGHTS) for vector in weights]
                pairs = [(vector, factor) for vector in given for factor in factors]
                sums = [_add_products(b, *pair, total) for pair, total in zip(pairs, sums, strict=True)]
            return sums

        count = b.mul(num_steps, INT(STEP // _LOOP_LEN))
        sums = loop(b, count, [_SUMS([0] * LANES)] * (num_rows * WEIGHT_ROWS), add_some)
        scales = _load(b, weight_scales, first, _BLOCK_FLOATS)
        for index, number in enumerate(rows):
            total = _sums_of_lanes(b, sums[index * WEIGHT_ROWS : (index + 1) * WEIGHT_ROWS])
            scaled = b.fmul(b.sitofp(total, _BLOCK_FLOATS), scales)
            x_scale = _broadcast(b, b.load(b.gep(x_scales, [number])))
            address = b.gep(out, [b.add(b.mul(number, num_out), first)])
            _store_first(b, b.fmul(scaled, x_scale), address, b.sub(num_out, first))

    return callable_by_kernels(emit)


def _load(b: ir.IRBuilder, array: ir.Value, at: ir.Value, kind: ir.VectorType) -> ir.Value:
    return b.load(b.bitcast(b.gep(array, [at]), kind.as_pointer()), align=1)


def _broadcast(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    nothing = ir.VectorType(value.type, WEIGHT_ROWS)(ir.Undefined)
    return b.shuffle_vector(b.insert_element(nothing, value, _INT32(0)), nothing, _BLOCK_SUMS(None))


def _add_products(b: ir.IRBuilder, x: ir.Value, weight: ir.Value, sums: ir.Value) -> ir.Value:
    """Adds the products of two neighbours to the sum of their lane; LLVM has an instruction for just that."""
    products = b.mul(b.sext(x, _WIDE), b.sext(weight, _WIDE))
    even, odd = (_SUMS([2 * lane + place for lane in range(LANES)]) for place in (0, 1))
    nothing = _WIDE(ir.Undefined)
    return b.add(sums, b.add(b.shuffle_vector(products, nothing, even), b.shuffle_vector(products, nothing, odd)))


def _sums_of_lanes(b: ir.IRBuilder, vectors: Values) -> ir.Value:
    """The sums over the lanes of each of four vectors, as one vector."""

    def add_runs(x: ir.Value, y: ir.Value, run_len: int) -> ir.Value:
        return b.add(*split_runs(b, x, y, run_len))

    first, second, third, fourth = vectors
    total = add_runs(add_runs(first, second, 1), add_runs(third, fourth, 1), 2)
    num_lanes = LANES
    while num_lanes > WEIGHT_ROWS:
        num_lanes //= 2
        half, nothing = ir.VectorType(_INT32, num_lanes), total.type(ir.Undefined)
        halves = [half(list(range(start, start + num_lanes))) for start in (0, num_lanes)]
        total = b.add(*(b.shuffle_vector(total, nothing, lanes) for lanes in halves))
    return total


def _store_first(b: ir.IRBuilder, values: ir.Value, address: ir.Value, count: ir.Value) -> None:
    """Stores a vector's first elements: all of them, unless the count is less."""
    places = _BLOCK_SUMS(list(range(WEIGHT_ROWS)))
    mask = b.icmp_signed("<", places, _broadcast(b, b.trunc(count, _INT32)))
    pointer = b.bitcast(address, _BLOCK_FLOATS.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [_BLOCK_FLOATS, pointer.type, _INT32, mask.type])
    store = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.store.v{WEIGHT_ROWS}f32.p0")
    b.call(store, [values, pointer, _INT32(4), mask])
