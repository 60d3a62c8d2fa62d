"""Products with 8-bit weights on CPUs with AMX; the arithmetic of a tile is in `amx_products`."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.model.cpu import amx_products as products
from microturn.model.cpu.amx_products import TILE_BYTES, TILE_ROWS
from microturn.model.cpu.int8_kernels import quantize_row
from microturn.model.cpu.int8_products import PANEL, PANELS_AT_ONCE, STEP

_Array = NDArray[Any]

_CACHE_LINE_BYTES = 64

_halve = products.halve()
_configure = products.configure()
_release = products.release()
_tile = products.tile()


@numba.njit(nogil=True)
def _quantize_row(x: _Array, most_steps: int, halves: _Array, at: int, scale: _Array) -> None:
    num_steps = -(-x.shape[0] // STEP)
    steps = np.empty(num_steps * STEP, np.int16)
    quantize_row(x, most_steps, steps, scale)
    _halve(steps, num_steps, halves, at)


@numba.njit(nogil=True, parallel=True, cache=True)
def quantize(x: _Array, most_steps: int, halves: _Array, scales: _Array) -> None:
    """Rounds each row as `int8_kernels.quantize` does.

    Args:
        x: float32 [rows, width].
        most_steps: the integer to which the largest element of a row is rounded.
        halves: int8 [tiles of rows * padded width / STEP * 2 * TILE_BYTES], written (see `amx_products`), except for
            rows behind the last.
        scales: float32 [rows], written.
    """
    num_steps = -(-x.shape[1] // STEP)
    for row in numba.prange(x.shape[0]):
        tile, of_tile = row // TILE_ROWS, row % TILE_ROWS
        first = tile * num_steps * 2 * TILE_BYTES + of_tile * STEP
        _quantize_row(x[row], most_steps, halves, first, scales[row : row + 1])


@numba.njit(nogil=True, parallel=True, cache=True)
def multiply(x: _Array, x_scales: _Array, weight: _Array, weight_scales: _Array, out: _Array, num_threads: int) -> None:
    """Product of scaled rows of integers with the scaled rows of a weight; all arrays are contiguous.

    Args:
        x: int8, the bytes that `quantize` writes.
        x_scales: float32 [rows].
        weight: as for `int8_kernels.multiply`.
        weight_scales: likewise.
        out: likewise.
        num_threads: threads that share the panels.
    """
    num_rows, num_out = out.shape
    num_in = weight.shape[1] // PANEL
    num_pairs = weight.shape[0] // PANELS_AT_ONCE
    num_parts = min(num_threads, num_pairs)
    most_rows = max(1, min(num_rows, TILE_ROWS))  # a register has at least one row
    for part in numba.prange(num_parts):
        _configure(most_rows)
        for pair in range(part * num_pairs // num_parts, (part + 1) * num_pairs // num_parts):
            for row in range(0, num_rows, TILE_ROWS):
                count = min(TILE_ROWS, num_rows - row)
                _tile(x, x_scales, row, count, weight, weight_scales, PANELS_AT_ONCE * pair, num_in, out, num_out)
        _release()


@numba.njit(nogil=True, cache=True)
def round_and_multiply(
    x: _Array, most_steps: int, weight: _Array, weight_scales: _Array, out: _Array, num_threads: int
) -> None:
    """Product of rows, float32 [rows, in], with a weight; the others as in `quantize` and `multiply`."""
    num_tiles, num_in = -(-x.shape[0] // TILE_ROWS), weight.shape[1] // PANEL
    buffer = np.empty(num_tiles * 2 * TILE_ROWS * num_in + _CACHE_LINE_BYTES, np.int8)
    halves = buffer[-buffer.ctypes.data % _CACHE_LINE_BYTES :]
    scales = np.empty(x.shape[0], np.float32)
    quantize(x, most_steps, halves, scales)
    multiply(halves, scales, weight, weight_scales, out, num_threads)
