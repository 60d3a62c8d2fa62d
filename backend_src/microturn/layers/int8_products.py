"""The inner loop of products with 8-bit weights: a tile of integer sums, scaled.

Rows of weights are whole multiples of a scale of their own in 8 bits, rows of inputs in 16. Their products are added as
integers, so that neither the order of a sum nor the tiles change it: a row has the same result to the bit in any
company. Nothing saturates: two neighbours, widened to 16 bits, are multiplied and added up in 32 bits by an instruction
that every x86 CPU has, and `most_steps` keeps the whole sum within them.

Weights lie in *panels* of as many outputs as two vectors have lanes, pair of inputs by pair of inputs::

    weight[panel, pair, output, 2]     a load has the pair's two elements for one output per lane
    x[row, 2 * pair : 2 * pair + 2]    is repeated in all lanes

so that nothing is ever added across lanes. A panel is read once, in order, while what comes behind it is fetched, and
stays in the cache for all rows (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from microturn.attention.native_vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    broadcast,
    callable_by_kernels,
    fetch,
    for_each_choice,
    loop,
)
from microturn.kv_quantization import MOST_STEPS

_NUM_VECTORS = 2

# Outputs of a panel.
PANEL = _NUM_VECTORS * LANES

# Rows of a tile, at most: its sums fill half of the registers.
TILE_ROWS = 8 if HAS_AVX512 else 4

# A turn of the loop takes a cache line of weights: one pair of inputs with AVX-512, otherwise two. Rows are padded with
# zeros to whole multiples of that.
_LINE_BYTES = 64
_NUM_PAIRS = _LINE_BYTES // (2 * PANEL)
STEP = 2 * _NUM_PAIRS

# Weights are fetched so many bytes ahead.
_AHEAD = 4096

_MOST_INPUT_STEPS = 2**15 - 1

_INT32, _FLOAT = ir.IntType(32), ir.FloatType()
_SUMS, _FLOATS, _WIDE = ir.VectorType(_INT32, LANES), ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, 2 * LANES)
_INPUTS, _WEIGHTS = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.IntType(8), 2 * LANES)


def most_steps(width: int) -> int:
    """The largest input to be multiplied with weight rows of so many elements: no sum has more than 32 bits."""
    return min(_MOST_INPUT_STEPS, (2**31 - 1) // (MOST_STEPS * width))


def tile() -> Any:
    """Makes ``(x, x_scales, row, num_rows, weight, weight_scales, panel, num_in, out, num_out)``.

    For up to TILE_ROWS rows it sets ``out[row : row + num_rows, panel * PANEL : (panel + 1) * PANEL]``, as far as there
    are columns, to ``sum * weight_scale * x_scale``, multiplied in this order. Arrays are those of
    `int8_kernels.multiply`, and `num_in` is the padded width.
    """

    def emit(
        b: ir.IRBuilder, x: ir.Value, x_scales: ir.Value, row: ir.Value, num_rows: ir.Value, *args: ir.Value
    ) -> None:
        weight, weight_scales, panel, num_in, out, num_out = args
        first = b.mul(panel, INT(PANEL))
        start = b.gep(weight, [b.mul(first, num_in)])

        def emit_rows(count: int) -> None:
            rows = [b.add(row, INT(index)) for index in range(count)]
            inputs = [b.gep(x, [b.mul(index, num_in)]) for index in rows]

            def add_line(number: ir.Value, sums: Values) -> Values:
                line = b.gep(start, [b.mul(number, INT(_LINE_BYTES))])
                fetch(b, b.gep(line, [INT(_AHEAD)]))
                for pair in range(_NUM_PAIRS):
                    at = b.add(b.mul(number, INT(STEP)), INT(2 * pair))
                    starts = [2 * (pair * PANEL + vector * LANES) for vector in range(_NUM_VECTORS)]
                    factors = [_load(b, line, INT(place), _WEIGHTS) for place in starts]
                    given = [_repeated_pair(b, vector, at) for vector in inputs]
                    pairs = [(vector, factor) for vector in given for factor in factors]
                    sums = [_add_products(b, *pair, total) for pair, total in zip(pairs, sums, strict=True)]
                return sums

            zeros = [_SUMS([0] * LANES)] * (count * _NUM_VECTORS)
            sums = iter(loop(b, b.udiv(num_in, INT(STEP)), zeros, add_line))
            for number in rows:
                x_scale = broadcast(b, b.load(b.gep(x_scales, [number])))
                for vector in range(_NUM_VECTORS):
                    column = b.add(first, INT(vector * LANES))
                    scaled = b.fmul(b.sitofp(next(sums), _FLOATS), _load(b, weight_scales, column, _FLOATS))
                    address = b.gep(out, [b.add(b.mul(number, num_out), column)])
                    _store_first(b, b.fmul(scaled, x_scale), address, b.sub(num_out, column))

        for_each_choice(b, num_rows, range(1, TILE_ROWS + 1), emit_rows)

    return callable_by_kernels(emit)


def _load(b: ir.IRBuilder, array: ir.Value, at: ir.Value, kind: ir.VectorType) -> ir.Value:
    return b.load(b.bitcast(b.gep(array, [at]), kind.as_pointer()), align=1)


def _repeated_pair(b: ir.IRBuilder, x: ir.Value, at: ir.Value) -> ir.Value:
    """Two neighbours of a row in all lanes."""
    pair = b.load(b.bitcast(b.gep(x, [at]), _INT32.as_pointer()), align=2)
    return b.bitcast(broadcast(b, pair), _INPUTS)


def _add_products(b: ir.IRBuilder, x: ir.Value, weight: ir.Value, sums: ir.Value) -> ir.Value:
    """Adds the products of two neighbours to the sum of their lane; LLVM has an instruction for just that."""
    products = b.mul(b.sext(x, _WIDE), b.sext(weight, _WIDE))
    even, odd = (_SUMS([2 * lane + place for lane in range(LANES)]) for place in (0, 1))
    nothing = _WIDE(ir.Undefined)
    return b.add(sums, b.add(b.shuffle_vector(products, nothing, even), b.shuffle_vector(products, nothing, odd)))


def _store_first(b: ir.IRBuilder, values: ir.Value, address: ir.Value, count: ir.Value) -> None:
    """Stores a vector's first elements, as many as there are of so many; AMD's stores with a mask are slow."""
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
