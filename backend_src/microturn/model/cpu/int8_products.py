"""The inner loop of products with 8-bit weights: a tile of integer sums, scaled.

Rows of weights are 8-bit integers times a scale, rows of inputs are 16-bit integers times a scale. Their products are
added as integers, so that neither the order of a sum nor the tiles change it: a row has bitwise the same result in any
batch. Nothing saturates: two neighbours, widened to 16 bits, are multiplied and added in 32 bits by an instruction that
every x86 CPU has, and `most_steps` keeps the whole sum within 32 bits.

Weights lie in *panels* of as many outputs as a vector has lanes, four inputs by four::

    weight[panel, quad, output, 4]     a load has these four elements of half a panel's outputs
    x[row, 4 * quad : 4 * quad + 4]    is repeated for each of them

so that lanes are added only at the end, for the two sums of an output. A panel is read once, in order, while the next
data are prefetched, and stays in the cache for all rows (Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", 2008). CPUs with AMX read the same panels in another way: `amx_products`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils
from torch import Tensor
from torch.nn.functional import pad

from microturn.kv.quantization import MOST_STEPS
from microturn.model.cpu.vectors import (
    HAS_AVX512,
    INT,
    LANES,
    Values,
    add_products,
    broadcast,
    callable_by_kernels,
    fetch,
    for_each_choice,
    loop,
    sums_of_neighbours,
)

# Outputs of a panel. With AMX two panels are read at once: their number is even.
PANEL = LANES
PANELS_AT_ONCE = 2
_QUAD = 4
_NUM_VECTORS = 2

# Maximum rows of a tile: its sums fill half of the registers.
TILE_ROWS = 8 if HAS_AVX512 else 4

# Rows of inputs and weights are padded with zeros to multiples of this.
STEP = 64

# An iteration of the loop takes a cache line of weights.
_LINE_BYTES = 64
_NUM_QUADS = _LINE_BYTES // (_QUAD * PANEL)

# Weights are fetched so many bytes ahead.
_AHEAD = 4096

_MOST_INPUT_STEPS = 2**15 - 1

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_SUMS, _FLOATS, _WIDE = ir.VectorType(_INT32, LANES), ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, 2 * LANES)
_INPUTS, _WEIGHTS = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(ir.IntType(8), 2 * LANES)


def most_steps(width: int) -> int:
    """The largest input integer for weight rows of `width` elements, so that no sum exceeds 32 bits."""
    return min(_MOST_INPUT_STEPS, (2**31 - 1) // (MOST_STEPS * width))


def in_panels(steps: Tensor) -> Tensor:
    """Weights in the order of reading.

    Args:
        steps: int8 [outputs, inputs].

    Returns:
        int8 [panels, padded inputs * PANEL].
    """
    num_out, num_in = steps.shape
    padded = pad(steps, (0, -num_in % STEP, 0, -num_out % (PANELS_AT_ONCE * PANEL)))
    return padded.view(-1, PANEL, padded.shape[1] // _QUAD, _QUAD).transpose(1, 2).flatten(1)


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
                for quad in range(_NUM_QUADS):
                    at = b.mul(b.add(b.mul(number, INT(_NUM_QUADS)), INT(quad)), INT(_QUAD))
                    starts = [_QUAD * (quad * PANEL + vector * PANEL // _NUM_VECTORS) for vector in range(_NUM_VECTORS)]
                    factors = [load(b, line, INT(place), _WEIGHTS) for place in starts]
                    given = [_repeated_quad(b, vector, at) for vector in inputs]
                    pairs = [(vector, factor) for vector in given for factor in factors]
                    sums = [add_products(b, *pair, total) for pair, total in zip(pairs, sums, strict=True)]
                return sums

            zeros = [_SUMS([0] * LANES)] * (count * _NUM_VECTORS)
            halves = iter(loop(b, b.udiv(num_in, INT(_QUAD * _NUM_QUADS)), zeros, add_line))
            factors = load(b, weight_scales, first, _FLOATS)
            for number in rows:
                x_scale = broadcast(b, b.load(b.gep(x_scales, [number])))
                both = b.shuffle_vector(next(halves), next(halves), _WIDE(list(range(2 * LANES))))
                scaled = b.fmul(b.sitofp(sums_of_neighbours(b, both), _FLOATS), factors)
                address = b.gep(out, [b.add(b.mul(number, num_out), first)])
                store_first(b, b.fmul(scaled, x_scale), address, b.sub(num_out, first))

        for_each_choice(b, num_rows, range(1, TILE_ROWS + 1), emit_rows)

    return callable_by_kernels(emit)


def load(b: ir.IRBuilder, array: ir.Value, at: ir.Value, kind: ir.VectorType) -> ir.Value:
    return b.load(b.bitcast(b.gep(array, [at]), kind.as_pointer()), align=1)


def _repeated_quad(b: ir.IRBuilder, x: ir.Value, at: ir.Value) -> ir.Value:
    """Four neighbours of a row, in all lanes."""
    quad = b.load(b.bitcast(b.gep(x, [at]), _INT64.as_pointer()), align=2)
    return b.bitcast(broadcast(b, quad, LANES // 2), _INPUTS)


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
