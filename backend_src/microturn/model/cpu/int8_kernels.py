"""Products with 8-bit weights, and the quantization of their inputs.

A row's integers, scale and results depend on that row only. Arrays are contiguous. `int8_products` computes tiles.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.kv.quantization import MOST_STEPS
from microturn.model.cpu import int8_products as products
from microturn.model.cpu.int8_products import PANEL, QUAD, TILE_ROWS
from microturn.model.cpu.integer_products import UNSIGNED_OFFSET
from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.rounding import quantize_row
from microturn.model.cpu.vectors import LANES

_Array = NDArray[Any]

# This many rows are rounded faster than other threads wake up.
FEW_ROWS = 8

_tile = products.tile()


@numba.njit(nogil=True)
def _quantize_product_row(x: _Array, row: int, steps: _Array, scales: _Array, offsets: _Array) -> None:
    width, padded = x.shape[1], steps.shape[1]
    quantize_row(x[row], np.empty(width, np.float32), MOST_STEPS, steps, row * padded, scales, offsets, row)
    for d in range(width, padded):
        steps[row, d] = 0


@kernel(parallel=True)
def quantize(x: _Array, steps: _Array, scales: _Array, offsets: _Array) -> None:
    """Rotates each row, and quantizes it as `microturn.kv.quantization` does.

    Args:
        x: float32 [rows, width].
        steps: `StepType` [at least rows, padded width], written; zeros behind the width.
        scales: float32 [rows], written.
        offsets: int32 [rows], written: what UNSIGNED_OFFSET has added to each sum of products, negated.
    """
    if x.shape[0] <= FEW_ROWS:
        for row in range(x.shape[0]):
            _quantize_product_row(x, row, steps, scales, offsets)
    else:
        for row in numba.prange(x.shape[0]):
            _quantize_product_row(x, row, steps, scales, offsets)


@kernel(parallel=True)
def round_weight(weight: _Array, begin: int, panels: _Array, scales: _Array) -> None:
    """Rotates each row of a weight, and quantizes it as `microturn.kv.quantization` does, in the order of reading.

    Weights are read once and nothing of their size lies between: a start waits for this, and torch's operations one
    after another took ten times as long, most of it for new memory.

    Args:
        weight: float32 [out, in], contiguous.
        begin: the row of the panels that the first row of the weight becomes.
        panels: uint8 [panels, padded in / QUAD, PANEL, QUAD] (see `int8_products`), written where there are weights.
        scales: float32 [at least begin + out], written likewise.
    """
    num_out, num_in = weight.shape
    end = begin + num_out
    for panel in numba.prange(begin // PANEL, -(-end // PANEL)):
        rotated, steps = np.empty(num_in, np.float32), np.empty(num_in + -num_in % LANES, np.int8)
        offset = np.empty(1, np.int32)
        first = panel * PANEL
        for row in range(max(first, begin), min(first + PANEL, end)):
            quantize_row(weight[row - begin], rotated, MOST_STEPS, steps, 0, scales[row : row + 1], offset, 0)
            for d in range(num_in):
                panels[panel, d // QUAD, row - first, d % QUAD] = steps[d] + UNSIGNED_OFFSET


@kernel(parallel=True)
def multiply(
    x: _Array, x_scales: _Array, x_offsets: _Array, weight: _Array, weight_scales: _Array, out: _Array
) -> None:
    """Product of scaled rows of integers with the scaled rows of a weight; all arrays are contiguous.

    Args:
        x: steps [at least rows, padded in] that `quantize` writes; `x_scales` and `x_offsets` likewise.
        weight: uint8 [panels, padded in * PANEL] (see `int8_products`).
        weight_scales: float32 [panels * PANEL].
        out: float32 [rows, out], written: ``sum * weight_scale * x_scale``, multiplied in this order.
    """
    num_rows, num_out = out.shape
    num_in = x.shape[1]
    for panel in numba.prange(weight.shape[0]):
        for row in range(0, num_rows, TILE_ROWS):
            count = min(TILE_ROWS, num_rows - row)
            _tile(x, x_scales, x_offsets, row, count, weight, weight_scales, panel, num_in, out, num_out)
