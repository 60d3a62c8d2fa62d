"""Products with 8-bit weights, and the quantization of their inputs.

A row's integers, scale and results depend on that row only. Arrays are contiguous. `int8_products` computes tiles.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.kv.quantization import LEAST_SCALE, MOST_STEPS
from microturn.model.cpu import int8_products as products
from microturn.model.cpu.int8_products import PANEL, QUAD, TILE_ROWS, WEIGHT_OFFSET
from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.rotation import rotate_row

_Array = NDArray[Any]

# This many rows are rounded faster than other threads wake up.
FEW_ROWS = 8

_LEAST_SCALE = np.float32(LEAST_SCALE)
_NO_SIGN = np.int32(0x7FFFFFFF)

_tile = products.tile()


@numba.njit(nogil=True)
def _find_scale(x: _Array, most_steps: int, scale: _Array) -> None:
    """Sets the scale [1] with which a row's largest integer is `most_steps`.

    The scale of a row with a non-finite element is not finite: without their sign, floats are ordered like the integers
    with the same bits, infinity and NaN above all.
    """
    bits = x.view(np.int32)
    top = np.int32(0)
    for d in range(x.shape[0]):
        top = max(top, bits[d] & _NO_SIGN)
    scale.view(np.int32)[0] = top
    scale[0] = scale[0] / np.float32(most_steps)
    if scale[0] < _LEAST_SCALE:
        scale[0] = _LEAST_SCALE


@numba.njit(nogil=True)
def quantize_row(x: _Array, rotated: _Array, most_steps: int, steps: _Array, scale: _Array) -> np.int32:
    """Rotates a row [width] and rounds it to integers times a scale [1]; returns their sum.

    The largest is `most_steps`, and `rotated` [width] is scratch. No two arrays are one: LLVM would compute element by
    element where it cannot tell.
    """
    rotate_row(x, rotated)
    _find_scale(rotated, most_steps, scale)
    unit = scale[0]  # a local, so that the loop is one of vectors
    total = np.int32(0)
    for d in range(x.shape[0]):
        step = np.int32(np.rint(rotated[d] / unit))
        steps[d] = step
        total += step
    return total


@numba.njit(nogil=True)
def _quantize_product_row(x: _Array, steps: _Array, scale: _Array, offset: _Array) -> None:
    width = x.shape[0]
    total = quantize_row(x, np.empty(width, np.float32), MOST_STEPS, steps, scale)
    for d in range(width, steps.shape[0]):
        steps[d] = 0
    offset[0] = -WEIGHT_OFFSET * total


@kernel(parallel=True)
def quantize(x: _Array, steps: _Array, scales: _Array, offsets: _Array) -> None:
    """Rotates each row, and quantizes it as `microturn.kv.quantization` does.

    Args:
        x: float32 [rows, width].
        steps: `StepType` [at least rows, padded width], written; zeros behind the width.
        scales: float32 [rows], written.
        offsets: int32 [rows], written: what WEIGHT_OFFSET has added to each sum of products, negated.
    """
    if x.shape[0] <= FEW_ROWS:
        for row in range(x.shape[0]):
            _quantize_product_row(x[row], steps[row], scales[row : row + 1], offsets[row : row + 1])
    else:
        for row in numba.prange(x.shape[0]):
            _quantize_product_row(x[row], steps[row], scales[row : row + 1], offsets[row : row + 1])


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
        rotated, steps = np.empty(num_in, np.float32), np.empty(num_in, np.int8)
        first = panel * PANEL
        for row in range(max(first, begin), min(first + PANEL, end)):
            quantize_row(weight[row - begin], rotated, MOST_STEPS, steps, scales[row : row + 1])
            for d in range(num_in):
                panels[panel, d // QUAD, row - first, d % QUAD] = steps[d] + WEIGHT_OFFSET


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
