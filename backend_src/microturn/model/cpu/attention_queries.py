"""What a thread keeps while it attends: memory for a tile of rows, and their queries as operands of the pages."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.model.cpu import attention_panels as panels
from microturn.model.cpu.attention_operands import KEY_OFFSET
from microturn.model.cpu.attention_panels import KEY_BLOCK, NUM_KEY_VECTORS
from microturn.model.cpu.attention_products import ROWS_AT_ONCE
from microturn.model.cpu.int8_kernels import find_scale
from microturn.model.cpu.rotation import block_of, rotate_row

_Array = NDArray[Any]

_pack_queries = panels.pack_queries()


@numba.njit(nogil=True)
def new_memory(most_rows: int, padded_dim: int, lanes: _Array, operand_terms: int) -> tuple[_Array, ...]:
    """What a thread needs for tasks of so many rows: see `ready_queries` and `attention_kernels`."""
    return (
        np.zeros(most_rows * padded_dim, np.float32),
        np.empty(most_rows * padded_dim // operand_terms, lanes.dtype),
        np.ones(most_rows, np.float32),
        np.zeros(most_rows, np.int32),
        np.empty(most_rows, np.int64),
        np.empty(most_rows, np.int64),
        np.empty(most_rows, np.int64),
        np.empty(ROWS_AT_ONCE * KEY_BLOCK, np.float32),
        np.empty(ROWS_AT_ONCE * KEY_BLOCK // operand_terms, lanes.dtype),
        np.empty(most_rows, np.float32),
        np.empty(most_rows, np.float32),
        np.empty(3 * NUM_KEY_VECTORS, np.int64),
        np.empty(3 * NUM_KEY_VECTORS, np.int64),
    )


@numba.njit(nogil=True)
def new_result(most_rows: int, padded_dim: int) -> tuple[_Array, _Array, _Array]:
    """Memory for sums, peaks and totals of so many rows."""
    return (
        np.empty(most_rows * padded_dim, np.float32),
        np.empty(most_rows, np.float32),
        np.empty(most_rows, np.float32),
    )


@numba.njit(nogil=True)
def ready_queries(
    q: _Array,
    kv: _Array,
    num_kv_heads: int,
    head: int,
    task: _Array,
    scale: np.float32,
    has_scales: bool,
    padded_dim: int,
    memory: tuple[_Array, ...],
) -> None:
    """Scales the queries of a task's rows and packs them as operands of the pages.

    Writes queries [rows, lanes of padded_dim], their scales [rows], the offsets of their scores [rows], and `newest`
    [rows], the last key that a row sees. For pages `has_scales`, queries are rotated as keys are, and rounded.
    """
    floats, queries, query_scales, offsets, newest = memory[:5]
    first_row, num_rows, position, first_query = task[2], task[3], task[4], task[7]
    head_dim = q.shape[2]
    group = q.shape[1] // num_kv_heads
    for row in range(num_rows):
        token, query_head = (first_row + row) // group, head * group + (first_row + row) % group
        newest[row] = position + token
        of_row = floats[row * padded_dim : row * padded_dim + head_dim]
        for d in range(head_dim):
            of_row[d] = q[first_query + token, query_head, d] * scale
        if has_scales:
            rotate_row(of_row, of_row)
            find_scale(of_row, query_scales[row : row + 1])
            unit = query_scales[row]  # a local, so that the loop is one of vectors
            total = np.int32(0)
            for d in range(head_dim):
                step = np.rint(of_row[d] / unit)
                of_row[d] = step
                total += np.int32(step)
            offsets[row] = -KEY_OFFSET * total
            query_scales[row] = unit / np.float32(block_of(head_dim))
    _pack_queries(kv, floats, queries, num_rows * padded_dim)
