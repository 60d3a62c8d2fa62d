"""What a thread keeps while it attends: memory for a tile of rows, and their queries as operands of the pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.model.cpu import attention_panels as panels
from microturn.model.cpu.attention_operands import MOST_QUERY_STEPS, new_lanes
from microturn.model.cpu.attention_panels import KEY_BLOCK, NUM_KEY_VECTORS
from microturn.model.cpu.attention_products import ROWS_AT_ONCE
from microturn.model.cpu.rotation import block_of
from microturn.model.cpu.rounding import quantize_row

_Array = NDArray[Any]

_pack_queries = panels.pack_queries()


class TileMemory(NamedTuple):
    """Memory for a unit of so many rows, those of all its heads; `attention_kernels` attends in it.

    Attributes:
        floats: float32 [rows * padded_dim], queries before they are packed; zeros behind the head_dim.
        rotated: float32 [head_dim], scratch.
        queries: lanes [rows * padded_dim].
        query_scales: float32 [rows].
        offsets: int32 [rows], added to the scores.
        newest: int64 [rows], the last key that a row sees.
        first: int64 [rows], the first key of a block that a row sees; `end` of those likewise.
        scores: float32 [ROWS_AT_ONCE * KEY_BLOCK].
        weights: lanes [ROWS_AT_ONCE * KEY_BLOCK].
        weight_scales: float32 [rows].
        shrink: float32 [rows], the factor of earlier sums.
        at: int64 [3 * NUM_KEY_VECTORS], see `attention_panels.Block`; `next_at` of the block behind.
    """

    floats: _Array
    rotated: _Array
    queries: _Array
    query_scales: _Array
    offsets: _Array
    newest: _Array
    first: _Array
    end: _Array
    scores: _Array
    weights: _Array
    weight_scales: _Array
    shrink: _Array
    at: _Array
    next_at: _Array


@numba.njit(nogil=True)
def new_memory(kv: _Array, most_rows: int, head_dim: int, padded_dim: int) -> TileMemory:
    """Memory for units of up to so many rows, those of all their heads."""
    return TileMemory(
        np.zeros(most_rows * padded_dim, np.float32),
        np.empty(head_dim, np.float32),
        new_lanes(kv, most_rows * padded_dim),
        np.ones(most_rows, np.float32),
        np.zeros(most_rows, np.int32),
        np.empty(most_rows, np.int64),
        np.empty(most_rows, np.int64),
        np.empty(most_rows, np.int64),
        np.empty(ROWS_AT_ONCE * KEY_BLOCK, np.float32),
        new_lanes(kv, ROWS_AT_ONCE * KEY_BLOCK),
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
def query_of(row: int, task: _Array, first_head: int, group: int) -> tuple[int, int]:
    """The token and the query head of a unit's row; rows are counted head by head, tokens from the task's first one."""
    head, of_tile = first_head + row // task[3], task[2] + row % task[3]
    return of_tile // group, head * group + of_tile % group


@numba.njit(nogil=True)
def ready_queries(
    q: _Array,
    kv: _Array,
    num_kv_heads: int,
    first_head: int,
    num_heads: int,
    task: _Array,
    scale: np.float32,
    has_scales: bool,
    padded_dim: int,
    memory: TileMemory,
) -> None:
    """Scales the queries of a task's rows, head by head, and packs them as operands of the pages.

    Writes `queries`, `query_scales`, `offsets` and `newest`. For pages `has_scales`, queries are rotated as keys are,
    and rounded: the factor of scores is in their scales.
    """
    num_rows, position, first_query = num_heads * task[3], task[4], task[7]
    head_dim = q.shape[2]
    group = q.shape[1] // num_kv_heads
    steps, scales = memory.queries.view(np.int8), memory.query_scales
    for row in range(num_rows):
        token, query_head = query_of(row, task, first_head, group)
        memory.newest[row] = position + token
        first = row * padded_dim
        if has_scales:
            query = q[first_query + token, query_head]
            quantize_row(query, memory.rotated, MOST_QUERY_STEPS, steps, first, scales, memory.offsets, row)
            for d in range(head_dim, padded_dim):
                steps[first + d] = 0
            scales[row] *= scale / np.float32(block_of(head_dim))
        else:
            for d in range(head_dim):
                memory.floats[first + d] = q[first_query + token, query_head, d] * scale
    if not has_scales:
        _pack_queries(kv, memory.floats, memory.queries, num_rows * padded_dim)
