"""Products with 8-bit weights, and the quantization of their inputs.

A row's integers, scale and results depend on that row only. Arrays are contiguous. `int8_products` computes tiles.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.kv.quantization import LEAST_SCALE
from microturn.model.cpu import int8_products as products
from microturn.model.cpu.int8_products import PANEL, TILE_ROWS

_Array = NDArray[Any]

# This many elements are rounded faster than other threads wake up.
FEW_ROWS = 8

_LEAST_SCALE = np.float32(LEAST_SCALE)
_NO_SIGN = np.int32(0x7FFFFFFF)

_tile = products.tile()


@numba.njit(nogil=True)
def find_scale(x: _Array, most_steps: int, scale: _Array) -> None:
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
def quantize_row(x: _Array, most_steps: int, steps: _Array, scale: _Array) -> None:
    find_scale(x, most_steps, scale)
    inverse = np.float32(1.0) / scale[0]
    for d in range(x.shape[0]):
        steps[d] = np.int16(np.floor(x[d] * inverse + np.float32(0.5)))
    for d in range(x.shape[0], steps.shape[0]):
        steps[d] = 0


@numba.njit(nogil=True, parallel=True, cache=True)
def quantize(x: _Array, most_steps: int, steps: _Array, scales: _Array) -> None:
    """Quantizes each row to integers times a scale.

    Args:
        x: float32 [rows, width].
        most_steps: the integer of the largest element.
        steps: int16 [rows, padded width], written; zeros behind the width.
        scales: float32 [rows], written.
    """
    if x.shape[0] <= FEW_ROWS:
        for row in range(x.shape[0]):
            quantize_row(x[row], most_steps, steps[row], scales[row : row + 1])
    else:
        for row in numba.prange(x.shape[0]):
            quantize_row(x[row], most_steps, steps[row], scales[row : row + 1])


@numba.njit(nogil=True, parallel=True, cache=True)
def multiply(x: _Array, x_scales: _Array, weight: _Array, weight_scales: _Array, out: _Array) -> None:
    """Product of scaled rows of integers with the scaled rows of a weight; all arrays are contiguous.

    Args:
        x: int16 [rows, padded in], at most `most_steps` each.
        x_scales: float32 [rows].
        weight: int8 [panels, padded in * PANEL], from -127 to 127 (see `int8_products`).
        weight_scales: float32 [panels * PANEL].
        out: float32 [rows, out], written: ``sum * weight_scale * x_scale``, multiplied in this order.
    """
    num_rows, num_out = out.shape
    num_in = x.shape[1]
    for panel in numba.prange(weight.shape[0]):
        for row in range(0, num_rows, TILE_ROWS):
            count = min(TILE_ROWS, num_rows - row)
            _tile(x, x_scales, row, count, weight, weight_scales, panel, num_in, out, num_out)


@numba.njit(nogil=True, cache=True)
def round_and_multiply(x: _Array, most_steps: int, weight: _Array, weight_scales: _Array, out: _Array) -> None:
    """Product of rows, float32 [rows, in], with a weight; the others as in `quantize` and `multiply`."""
    steps = np.empty((x.shape[0], weight.shape[1] // PANEL), np.int16)
    scales = np.empty(x.shape[0], np.float32)
    quantize(x, most_steps, steps, scales)
    multiply(steps, scales, weight, weight_scales, out)
