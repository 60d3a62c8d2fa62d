"""Products with 8-bit weights on CPUs with AMX; the arithmetic of a tile is in `amx_products`."""

from __future__ import annotations

from typing import Any

import numba
from numpy.typing import NDArray

from microturn.model.cpu import amx_products as products
from microturn.model.cpu.amx_products import TILE_ROWS
from microturn.model.cpu.int8_products import PANELS_AT_ONCE
from microturn.model.cpu.kernel_cache import kernel

_Array = NDArray[Any]

_configure = products.configure()
_release = products.release()
_tile = products.tile()


@kernel(parallel=True)
def multiply(
    x: _Array,
    x_scales: _Array,
    x_offsets: _Array,
    weight: _Array,
    weight_scales: _Array,
    out: _Array,
    num_threads: int,
) -> None:
    """See `int8_kernels.multiply`.

    Args:
        x: has a multiple of TILE_ROWS rows.
        num_threads: threads that share the panels.
    """
    num_rows, num_out = out.shape
    num_in = x.shape[1]
    num_pairs = weight.shape[0] // PANELS_AT_ONCE
    num_parts = min(num_threads, num_pairs)
    for part in numba.prange(num_parts):
        _configure()
        for pair in range(part * num_pairs // num_parts, (part + 1) * num_pairs // num_parts):
            for row in range(0, num_rows, TILE_ROWS):
                count, panel = min(TILE_ROWS, num_rows - row), PANELS_AT_ONCE * pair
                _tile(x, x_scales, x_offsets, row, count, weight, weight_scales, panel, num_in, out, num_out)
        _release()
