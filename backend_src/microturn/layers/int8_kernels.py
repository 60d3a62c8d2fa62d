"""What surrounds a product with 8-bit weights: rows of floats become integers of a scale, and sums become floats again.

A row's integers, its scale and its results depend on that row alone. All arrays are contiguous. The arithmetic of a
tile is in `int8_products`; Numba's cache of compiled code watches this file alone: touch it after a change there.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.kv_quantization import LEAST_SCALE
from microturn.layers import int8_products as products
from microturn.layers.int8_products import STEP, TILE_ROWS, WEIGHT_ROWS

_Array = NDArray[Any]

_LEAST_SCALE = np.float32(LEAST_SCALE)
_NO_SIGN = np.int32(0x7FFFFFFF)

_tile = products.tile(TILE_ROWS)
_single = products.tile(1)


@numba.njit(nogil=True)
def _find_scale(x: _Array, most_steps: int, scale: _Array) -> None:
    """Sets the scale [1] with which a row has at most so many steps.

    A row that is not finite throughout has a scale that is not either: without their sign, floats are ordered as the
    integers of the same bits, infinity and NaN above all.
    """
    bits = x.view(np.int32)
    top = np.int32(0)
    for d in range(x.shape[0]):
        top = max(top, bits[d] & _NO_SIGN)
    scale.view(np.int32)[0] = top
    scale[0] = scale[0] / np.float32(most_steps)
    if scale[0] < _LEAST_SCALE:
        scale[0] = _LEAST_SCALE


@numba.njit(nogil=True, cache=True)
def quantize(x: _Array, most_steps: int, steps: _Array, scales: _Array) -> None:
    """Rounds each row to multiples of a part of its largest element.

    Args:
        x: float32 [rows, width].
        most_steps: how many of them the largest element is.
        steps: int16 [rows, padded width], written, zeros behind the width.
        scales: float32 [rows], written.
    """
    width = x.shape[1]
    for row in range(x.shape[0]):
        _find_scale(x[row], most_steps, scales[row : row + 1])
        inverse = np.float32(1.0) / scales[row]
        for d in range(width):
            steps[row, d] = np.int16(np.floor(x[row, d] * inverse + np.float32(0.5)))
        for d in range(width, steps.shape[1]):
            steps[row, d] = 0


@numba.njit(nogil=True, parallel=True, cache=True)
def multiply(x: _Array, x_scales: _Array, weight: _Array, weight_scales: _Array, out: _Array) -> None:
    """Product of scaled rows of integers with the scaled rows of a weight; all arrays are contiguous.

    Args:
        x: int16 [rows, padded in], at most `most_steps` each.
        x_scales: float32 [rows].
        weight: int8 [padded out, padded in], from -127 to 127.
        weight_scales: float32 [padded out].
        out: float32 [rows, out], written: ``sum * weight_scale * x_scale``, multiplied in this order.
    """
    num_rows, num_out = out.shape
    num_steps = weight.shape[1] // STEP
    num_tiled = num_rows - num_rows % TILE_ROWS
    for block in numba.prange(len(weight) // WEIGHT_ROWS):
        first = block * WEIGHT_ROWS
        for row in range(0, num_tiled, TILE_ROWS):
            _tile(x, x_scales, row, weight, weight_scales, first, num_steps, out, num_out)
        for row in range(num_tiled, num_rows):
            _single(x, x_scales, row, weight, weight_scales, first, num_steps, out, num_out)


@numba.njit(nogil=True, cache=True)
def round_and_multiply(x: _Array, most_steps: int, weight: _Array, weight_scales: _Array, out: _Array) -> None:
    """Product of few rows, float32 [rows, in], with a weight; the others as in `quantize` and `multiply`."""
    steps = np.empty((x.shape[0], weight.shape[1]), np.int16)
    scales = np.empty(x.shape[0], np.float32)
    quantize(x, most_steps, steps, scales)
    multiply(steps, scales, weight, weight_scales, out)


@numba.njit(nogil=True, parallel=True, cache=True)
def quantize_to_bytes(x: _Array, most_steps: int, steps: _Array, scales: _Array) -> None:
    """As `quantize`, in all threads and with each step in two signed bytes: ``256 * steps[0] + steps[1]``.

    Args:
        x: float32 [rows, width].
        most_steps: how many of them the largest element is.
        steps: int8 [2, rows, padded width], written, zeros behind the width.
        scales: float32 [rows], written.
    """
    width = x.shape[1]
    for row in numba.prange(x.shape[0]):
        _find_scale(x[row], most_steps, scales[row : row + 1])
        inverse = np.float32(1.0) / scales[row]
        for d in range(width):
            step = np.int32(np.floor(x[row, d] * inverse + np.float32(0.5)))
            steps[0, row, d] = np.int8((step + 128) >> 8)
            steps[1, row, d] = np.int8(step)
        for d in range(width, steps.shape[2]):
            steps[0, row, d] = 0
            steps[1, row, d] = 0


@numba.njit(nogil=True, parallel=True, cache=True)
def scale_sums(sums: _Array, x_scales: _Array, weight_scales: _Array, out: _Array) -> None:
    """Puts the sums of both bytes together, with the bits that `multiply` has.

    Args:
        sums: int32 [2, rows, out]; they may have run over 32 bits, together they do not.
        x_scales: float32 [rows].
        weight_scales: float32 [out] or more.
        out: float32 [rows, out], written.
    """
    for row in numba.prange(out.shape[0]):
        for d in range(out.shape[1]):
            total = (sums[0, row, d] << np.int32(8)) + sums[1, row, d]
            out[row, d] = np.float32(np.int32(total)) * weight_scales[d] * x_scales[row]
