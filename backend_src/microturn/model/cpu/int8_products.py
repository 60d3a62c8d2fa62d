"""The inner loop of products with 8-bit weights: a tile of integer sums, scaled.

Rows of weights and rows of inputs are 8-bit integers times a scale. Their products are added as integers, so that
neither the order of a sum nor the tiles change it: a row has bitwise the same result in any batch. CPUs with VNNI
multiply and add four neighbouring bytes at once, one factor without and one with a sign: weights are stored with 128
added, and the 128 inputs too many that a sum has are taken off at its end. On other CPUs two neighbours, widened to 16
bits, are multiplied and added by an instruction that every x86 CPU has. Nothing saturates, and a sum that leaves 32
bits on its way comes back: its end is within them.

Weights lie in *panels* of as many outputs as a vector has lanes, four inputs by four::

    weight[panel, quad, output, 4]     a load has these four elements of a panel's outputs, or of half of them, widened
    x[row, 4 * quad : 4 * quad + 4]    is repeated for each of them

A panel is read once, in order, while the next data are prefetched, and stays in the cache for all rows (Goto and van de
Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). CPUs with AMX read the same panels in another way:
`amx_products`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from microturn.kv.quantization import MOST_STEPS
from microturn.model.cpu.integer_products import HAS_VNNI, add_products, add_products_of_bytes, sums_of_neighbours
from microturn.model.cpu.vectors import (
    HAS_AVX512,
    INT,
    L1,
    L2,
    LANES,
    Values,
    broadcast,
    callable_by_kernels,
    fetch,
    for_each_choice,
    loop,
)
from microturn.model.cpu.weight_memory import zeros

# The type of the integers of inputs.
StepType: type[np.signedinteger[Any]] = np.int8 if HAS_VNNI else np.int16

# Outputs of a panel. With AMX two panels are read at once: their number is even.
PANEL = LANES
PANELS_AT_ONCE = 2
# Inputs of an output that lie together.
QUAD = 4

# Vectors of weights that a load fills, and so vectors of sums of a row.
_NUM_VECTORS = 1 if HAS_VNNI else 2

# Maximum rows of a tile: its sums fill half of the registers.
TILE_ROWS = (16 if HAS_AVX512 else 8) // _NUM_VECTORS

# Rows of inputs and weights are padded with zeros to multiples of this.
STEP = 64

# Of inputs: the largest sum has 32 bits.
MOST_WIDTH = (2**31 - 1) // MOST_STEPS**2

# An iteration of the loop takes a cache line of weights.
_LINE_BYTES = 64
_NUM_QUADS = _LINE_BYTES // (QUAD * PANEL)

# Weights are fetched so many bytes ahead: into L2, as Intel's L1 has few lines under way. Without AVX-512 into L1.
_AHEAD, _FETCHED_TO = 4096, L2 if HAS_AVX512 else L1

_INT32, _FLOAT = ir.IntType(32), ir.FloatType()
_SUMS, _FLOATS, _WIDE = ir.VectorType(_INT32, LANES), ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, 2 * LANES)
_INPUTS = ir.VectorType(ir.IntType(np.dtype(StepType).itemsize * 8), QUAD * LANES // _NUM_VECTORS)
_WEIGHTS = ir.VectorType(ir.IntType(8), QUAD * LANES // _NUM_VECTORS)


def empty_panels(num_out: int, num_in: int) -> NDArray[np.uint8]:
    """Panels of zeros [panels, padded inputs / QUAD, PANEL, QUAD], for weights with UNSIGNED_OFFSET added."""
    num_panels = PANELS_AT_ONCE * -(-num_out // (PANELS_AT_ONCE * PANEL))
    return zeros((num_panels, (num_in + -num_in % STEP) // QUAD, PANEL, QUAD))


def tile() -> Any:
    """Makes ``(x, x_scales, x_offsets, row, num_rows, weight, weight_scales, panel, num_in, out, num_out)``.

    For up to TILE_ROWS rows it sets ``out[row : row + num_rows, panel * PANEL : (panel + 1) * PANEL]``, as far as there
    are columns, to ``(sum + x_offset) * weight_scale * x_scale``, multiplied in this order. Arrays are those of
    `int8_kernels.multiply`, and `num_in` is the padded width.
    """

    def emit(b: ir.IRBuilder, x: ir.Value, x_scales: ir.Value, x_offsets: ir.Value, *args: ir.Value) -> None:
        row, num_rows, weight, weight_scales, panel, num_in, out, num_out = args
        first = b.mul(panel, INT(PANEL))
        start = b.gep(weight, [b.mul(first, num_in)])

        def emit_rows(count: int) -> None:
            rows = [b.add(row, INT(index)) for index in range(count)]
            inputs = [b.gep(x, [b.mul(index, num_in)]) for index in rows]

            def add_line(number: ir.Value, sums: Values) -> Values:
                line = b.gep(start, [b.mul(number, INT(_LINE_BYTES))])
                fetch(b, b.gep(line, [INT(_AHEAD)]), _FETCHED_TO)
                for quad in range(_NUM_QUADS):
                    at = b.mul(b.add(b.mul(number, INT(_NUM_QUADS)), INT(quad)), INT(QUAD))
                    starts = [QUAD * (quad * PANEL + vector * PANEL // _NUM_VECTORS) for vector in range(_NUM_VECTORS)]
                    factors = [load(b, line, INT(place), _WEIGHTS) for place in starts]
                    given = [_repeated_quad(b, vector, at) for vector in inputs]
                    pairs = [(factor, vector) for vector in given for factor in factors]
                    sums = [_add_products(b, *pair, total) for pair, total in zip(pairs, sums, strict=True)]
                return sums

            zeros = [_SUMS([0] * LANES)] * (count * _NUM_VECTORS)
            found = loop(b, b.udiv(num_in, INT(QUAD * _NUM_QUADS)), zeros, add_line)
            factors = load(b, weight_scales, first, _FLOATS)
            for index, number in enumerate(rows):
                x_scale, offset = (broadcast(b, b.load(b.gep(of_row, [number]))) for of_row in (x_scales, x_offsets))
                sums = _sums_of_outputs(b, found[index * _NUM_VECTORS : (index + 1) * _NUM_VECTORS])
                scaled = b.fmul(b.sitofp(b.add(sums, offset), _FLOATS), factors)
                address = b.gep(out, [b.add(b.mul(number, num_out), first)])
                store_first(b, b.fmul(scaled, x_scale), address, b.sub(num_out, first))

        for_each_choice(b, num_rows, range(1, TILE_ROWS + 1), emit_rows)

    return callable_by_kernels(emit)


def _repeated_quad(b: ir.IRBuilder, x: ir.Value, at: ir.Value) -> ir.Value:
    """Four neighbours of a row, in all lanes."""
    kind = ir.IntType(QUAD * _INPUTS.element.width)
    quad = b.load(b.bitcast(b.gep(x, [at]), kind.as_pointer()), align=1)
    return b.bitcast(broadcast(b, quad, _INPUTS.count // QUAD), _INPUTS)


def _add_products(b: ir.IRBuilder, weights: ir.Value, inputs: ir.Value, sums: ir.Value) -> ir.Value:
    """Adds the products of each lane's neighbours: four with VNNI, otherwise two."""
    if HAS_VNNI:
        return add_products_of_bytes(b, weights, inputs, sums)
    return add_products(b, b.zext(weights, _INPUTS), inputs, sums)


def _sums_of_outputs(b: ir.IRBuilder, sums: Values) -> ir.Value:
    if HAS_VNNI:
        return sums[0]
    return sums_of_neighbours(b, b.shuffle_vector(*sums, _WIDE(list(range(2 * LANES)))))


def load(b: ir.IRBuilder, array: ir.Value, at: ir.Value, kind: ir.VectorType) -> ir.Value:
    return b.load(b.bitcast(b.gep(array, [at]), kind.as_pointer()), align=1)


def store_first(b: ir.IRBuilder, values: ir.Value, address: ir.Value, count: ir.Value) -> None:
    """Stores up to `count` first elements of a vector without a masked store, which is slow on AMD."""
    pointer = b.bitcast(address, _FLOATS.as_pointer())
    with b.if_else(b.icmp_signed(">=", count, INT(LANES))) as (has_all, has_some):
        with has_all:
            b.store(values, pointer, align=4)
        with has_some:
            lanes = ir.VectorType(INT, LANES)(list(range(LANES)))
            mask = b.icmp_signed("<", lanes, broadcast(b, count))
            kind = ir.FunctionType(ir.VoidType(), [_FLOATS, pointer.type, _INT32, mask.type])
            store = cgutils.get_or_insert_function(b.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
            b.call(store, [values, pointer, _INT32(4), mask])
