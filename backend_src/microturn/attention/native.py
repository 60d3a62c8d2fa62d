"""Attention over KV pages where they lie: one call serves all rows of a step, and no context is copied.

Each query tile of a row is cut along its keys into splits of fixed length; every (split, KV head) is an independent
task with an online softmax (Milakov and Gimelshein, 2018; split over keys as in Flash-Decoding, Dao et al., 2023), and
the partial results are merged in order. Tiles and splits depend on the row alone, so that a row's result does not
depend on its company.

Threads: Numba's OpenMP layer binds to the OpenMP runtime that torch has loaded, so both share one team. Its other
layers bring threads of their own, which fight with torch's waiting ones: measured twice as slow on two cores.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Self

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.attention.step import Int32Array, PagedStep

QUERY_TILE = 4
SPLIT_LEN = 256

# No infinities or NaNs are assumed away, yet masked scores are a large negative number: exp() of it is 0, never NaN.
_FAST = {"contract", "reassoc", "nsz", "arcp", "afn"}
_MASKED = np.float32(-1e30)
_UNBOUNDED = 2**30


def unavailable_reason() -> str | None:
    """Why this kernel cannot run here, or None when it can."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        return f"Numba's OpenMP layer does not load ({error}); install libgomp1 for faster attention"
    return None


@dataclass(frozen=True)
class NativePlan:
    """The tasks of one step.

    Attributes:
        tasks: int32 [tasks, 5]: row, first query (packed), queries, position of the first query, first key of the
            split. The splits of a tile are consecutive, in the order of their keys.
        tile_indptr: int32 [tiles + 1], tiles' splits in `tasks`.
    """

    step: PagedStep
    tasks: Int32Array
    tile_indptr: Int32Array

    @classmethod
    def plan(cls, step: PagedStep, rows: list[int]) -> Self:
        """Cuts some rows of a step into tasks."""
        tasks: list[tuple[int, ...]] = []
        tile_indptr = [0]
        for row in rows:
            start, end = int(step.query_indptr[row]), int(step.query_indptr[row + 1])
            position = int(step.context_len[row]) - (end - start)
            for first in range(start, end, QUERY_TILE):
                num = min(QUERY_TILE, end - first)
                at = position + first - start
                tasks += [(row, first, num, at, key) for key in range(0, at + num, SPLIT_LEN)]
                tile_indptr.append(len(tasks))
        return cls(step, np.array(tasks, np.int32).reshape(-1, 5), np.array(tile_indptr, np.int32))

    def append_and_attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, scale: float, window: int | None, out: Tensor
    ) -> None:
        """Writes all new keys and values of the step, then attends the planned rows.

        Shapes: q and out [tokens, heads, head_dim]; k and v [tokens, kv_heads, head_dim]; kv as in KVTensors.
        """
        num_kv_heads = k.shape[1]
        num_rows = QUERY_TILE * (q.shape[1] // num_kv_heads)
        num_partials = len(self.tasks) * num_kv_heads
        step = self.step
        _append_and_attend(
            q.numpy(),
            k.numpy(),
            v.numpy(),
            kv.numpy(),
            step.slots,
            step.page_ids,
            step.page_indptr,
            self.tasks,
            self.tile_indptr,
            np.float32(scale),
            _UNBOUNDED if window is None else window,
            out.numpy(),
            np.empty((num_partials, num_rows, q.shape[2]), np.float32),
            np.empty((num_partials, num_rows), np.float32),
            np.empty((num_partials, num_rows), np.float32),
        )


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of this kernel for the calling thread, and selects the layer that shares torch's team."""
    numba.config.THREADING_LAYER = "omp"
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


# The kernels take arrays of Numba's kind; their types are inferred at the first call.
_Array = NDArray[Any]


@numba.njit(fastmath=_FAST, nogil=True)
def _attend_split(
    q: _Array,
    kv: _Array,
    pages: _Array,
    head: int,
    task: _Array,
    scale: np.float32,
    window: int,
    acc: _Array,
    peak: _Array,
    total: _Array,
) -> None:
    """One split of one tile for one KV head: acc [queries * group, head_dim], peak and total [queries * group]."""
    first_query, num_queries, position, key_start = task[1], task[2], task[3], task[4]
    page_size, num_kv_heads, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    num_rows = num_queries * group
    scores = np.empty(page_size, dtype=np.float32)
    for row in range(num_rows):
        peak[row] = _MASKED
        total[row] = np.float32(0.0)
        for d in range(head_dim):
            acc[row, d] = np.float32(0.0)

    key_end = min(key_start + SPLIT_LEN, position + num_queries)
    oldest = max(key_start, position - window + 1)
    for page_index in range(oldest // page_size, (key_end + page_size - 1) // page_size):
        page = pages[page_index]
        first_key = page_index * page_size
        num_keys = min(page_size, key_end - first_key)
        for row in range(num_rows):
            query = row // group
            query_head = head * group + row % group
            newest_visible = position + query
            oldest_visible = max(key_start, newest_visible - window + 1)
            best = _MASKED
            for t in range(num_keys):
                score = np.float32(0.0)
                for d in range(head_dim):
                    score += q[first_query + query, query_head, d] * kv[page, 0, t, head, d]
                score *= scale
                if first_key + t > newest_visible or first_key + t < oldest_visible:
                    score = _MASKED
                scores[t] = score
                best = max(best, score)
            if best == _MASKED:
                continue
            if best > peak[row]:
                shrink = np.exp(peak[row] - best)
                total[row] *= shrink
                for d in range(head_dim):
                    acc[row, d] *= shrink
                peak[row] = best
            for t in range(num_keys):
                weight = np.exp(scores[t] - peak[row])
                total[row] += weight
                for d in range(head_dim):
                    acc[row, d] += weight * kv[page, 1, t, head, d]


@numba.njit(fastmath=_FAST, nogil=True, parallel=True, cache=True)
def _append_and_attend(
    q: _Array,
    k: _Array,
    v: _Array,
    kv: _Array,
    slots: _Array,
    page_ids: _Array,
    page_indptr: _Array,
    tasks: _Array,
    tile_indptr: _Array,
    scale: np.float32,
    window: int,
    out: _Array,
    acc: _Array,
    peak: _Array,
    total: _Array,
) -> None:
    page_size, num_kv_heads = kv.shape[2], kv.shape[3]
    group = q.shape[1] // num_kv_heads
    for token in numba.prange(k.shape[0]):
        page, offset = slots[token] // page_size, slots[token] % page_size
        kv[page, 0, offset] = k[token]
        kv[page, 1, offset] = v[token]

    for part in numba.prange(tasks.shape[0] * num_kv_heads):
        task = tasks[part // num_kv_heads]
        pages = page_ids[page_indptr[task[0]] :]
        _attend_split(q, kv, pages, part % num_kv_heads, task, scale, window, acc[part], peak[part], total[part])

    for index in numba.prange((tile_indptr.shape[0] - 1) * num_kv_heads):
        tile, head = index // num_kv_heads, index % num_kv_heads
        first_task, last_task = tile_indptr[tile], tile_indptr[tile + 1]
        for row in range(tasks[first_task, 2] * group):
            result = out[tasks[first_task, 1] + row // group, head * group + row % group]
            best = _MASKED
            for task_index in range(first_task, last_task):
                best = max(best, peak[task_index * num_kv_heads + head, row])
            norm = np.float32(0.0)
            result[:] = np.float32(0.0)
            for task_index in range(first_task, last_task):
                part = task_index * num_kv_heads + head
                weight = np.exp(peak[part, row] - best)
                norm += weight * total[part, row]
                for d in range(result.shape[0]):
                    result[d] += weight * acc[part, row, d]
            for d in range(result.shape[0]):
                result[d] /= norm
