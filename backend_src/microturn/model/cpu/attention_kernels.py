"""The kernels of native attention, compiled by Numba; `attention` describes the algorithm and plans their tasks.

The arithmetic on a block of keys is in `attention_products`, what it reads in `attention_sources`, and how pages are
written in `attention_packing`.

There is a kernel for each type of pages, compiled at its first call. Loops are written out: an array expression or a
slice takes Numba up to a second to compile.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.model.cpu import attention_packing as packing
from microturn.model.cpu import attention_products as products
from microturn.model.cpu import attention_sources as sources
from microturn.model.cpu.attention_products import MAX_VECTORS, NARROW_BLOCK, NARROW_ROWS, WIDE_BLOCK
from microturn.model.cpu.vectors import LANES

# Maximum rows of a tile: the width of the block of sums in registers.
TILE_ROWS = MAX_VECTORS * LANES

# Keys whose scores are kept at a time: with 48 rows and head_dim 64, scores, queries and sums fill 36 KiB of cache. A
# narrow tile has fewer, since as many again are being prefetched while the values must stay in the cache.
KEY_BLOCK = 64
NARROW_KEY_BLOCK = 32

# A masked score is so far below the initial peak that its weight is 0 even if all keys so far are masked.
_MASKED = np.float32(-3e38)
_NO_SCORE = np.float32(-1e30)

# The kernels take arrays of Numba's kind; their types are inferred at the first call.
_Array = NDArray[Any]

_pack = packing.pack()
_prefetch = sources.prefetch()
_unpack = sources.unpack()
_softmax = products.softmax()
_narrow_scores = products.narrow_scores()
_narrow_softmax = products.narrow_softmax()
_narrow_values = products.narrow_values(NARROW_BLOCK)
_narrow_rest = products.narrow_values(1)
_wide_scores = products.wide_scores()
_wide_values = products.wide_values(WIDE_BLOCK)
_wide_rest = products.wide_values(1)


@numba.njit(nogil=True)
def is_narrow(num_rows: int, head_dim: int, exact: bool) -> bool:
    """Whether a tile has the narrow layout. The two layouts add in different orders: exact results need one."""
    return num_rows <= NARROW_ROWS and head_dim % LANES == 0 and not exact


@numba.njit(nogil=True)
def _num_vectors(num_rows: int) -> int:
    return (num_rows + LANES - 1) // LANES


@numba.njit(nogil=True)
def _attend(
    q: _Array,
    kv: _Array,
    scales: _Array,
    pages: _Array,
    head: int,
    task: _Array,
    scale: np.float32,
    window: int,
    exact: bool,
    sums: _Array,
    peak: _Array,
    total: _Array,
) -> None:
    """One task: adds its keys to sums [head_dim, rows], in a narrow tile [rows, head_dim], and to peak and total."""
    first_row, num_rows, position = task[2], task[3], task[4]
    key_start, key_end, first_query, phase = task[5], task[6], task[7], task[8]
    num_kv_heads, page_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    to_values = num_kv_heads * page_size * head_dim
    narrow, num_vectors = is_narrow(num_rows, head_dim, exact), _num_vectors(num_rows)
    block_len = NARROW_KEY_BLOCK if narrow else KEY_BLOCK
    row_stride, element_stride = (head_dim, 1) if narrow else (1, num_vectors * LANES)

    # Index of each key; the last one is repeated, so that all blocks are full.
    num_task_keys = key_end - key_start
    key_at = np.empty(num_task_keys + KEY_BLOCK + WIDE_BLOCK, np.int64)
    page, offset = key_start // page_size, key_start % page_size
    for t in range(num_task_keys):
        key_at[t] = ((2 * np.int64(pages[page]) * num_kv_heads + head) * page_size + offset) * head_dim
        offset += 1
        if offset == page_size:
            page, offset = page + 1, 0
    for t in range(num_task_keys, key_at.shape[0]):
        key_at[t] = key_at[num_task_keys - 1]

    block = np.empty(KEY_BLOCK * head_dim, np.float32)
    num_first = min(block_len, num_task_keys)
    _prefetch(kv, block, key_at, 0, head_dim, 0, num_first)
    if narrow:
        _prefetch(kv, block, key_at, to_values, head_dim, 0, num_first)

    queries = np.zeros(sums.shape[0], np.float32)
    for row in range(num_rows):
        query, query_head = first_query + (first_row + row) // group, head * group + (first_row + row) % group
        for d in range(head_dim):
            queries[row * row_stride + d * element_stride] = q[query, query_head, d] * scale
    oldest_query = position + first_row // group
    newest_query = position + (first_row + num_rows - 1) // group

    for row in range(peak.shape[0]):
        peak[row] = _NO_SCORE
        total[row] = 0
    for at in range(sums.shape[0]):
        sums[at] = 0
    scores = np.zeros((block_len, NARROW_ROWS if narrow else num_vectors * LANES), np.float32)
    shrink = np.empty(num_vectors * LANES, np.float32)
    first_key = key_start
    while first_key < key_end:
        num_keys = min(block_len - (first_key + phase) % block_len, key_end - first_key)
        block_at = key_at[first_key - key_start :]
        if narrow:
            for t in range(0, num_keys, NARROW_BLOCK):
                _prefetch(kv, block, block_at, 0, head_dim, t + NARROW_KEY_BLOCK, NARROW_BLOCK)
                _narrow_scores(scores, kv, block, block_at, 0, head_dim, scales, queries, t)
        else:
            _unpack(kv, block, block_at, 0, head_dim, scales, num_keys + -num_keys % WIDE_BLOCK)
            for t in range(0, num_keys, WIDE_BLOCK):
                _prefetch(kv, block, block_at, to_values, head_dim, t, WIDE_BLOCK)
                _prefetch(kv, block, block_at, 0, head_dim, t + KEY_BLOCK, WIDE_BLOCK)
                _wide_scores(scores, kv, block, block_at, 0, head_dim, queries, t, num_vectors)

        if first_key + num_keys - 1 > oldest_query or first_key <= newest_query - window:
            for row in range(num_rows):
                newest = position + (first_row + row) // group
                for t in range(num_keys):
                    if not newest - window < first_key + t <= newest:
                        scores[t, row] = _MASKED

        if narrow:
            for t in range(num_keys, num_keys + -num_keys % NARROW_BLOCK):
                for row in range(num_rows):
                    scores[t, row] = _MASKED
            _narrow_softmax(scores, peak, total, shrink, (num_keys + NARROW_BLOCK - 1) // NARROW_BLOCK)
        else:
            _softmax(scores, peak, total, shrink, num_keys, num_vectors)

        if narrow:
            whole = head_dim - head_dim % (NARROW_BLOCK * LANES)
            values = kv, block, block_at, to_values, head_dim, scales, block_len
            for d in range(0, whole, NARROW_BLOCK * LANES):
                _narrow_values(sums, shrink, *values, scores, d, num_keys)
            for d in range(whole, head_dim, LANES):
                _narrow_rest(sums, shrink, *values, scores, d, num_keys)
        else:
            _unpack(kv, block, block_at, to_values, head_dim, scales, num_keys)
            whole = head_dim - head_dim % WIDE_BLOCK
            for d in range(0, whole, WIDE_BLOCK):
                _wide_values(sums, shrink, kv, block, block_at, to_values, head_dim, scores, d, num_keys, num_vectors)
            for d in range(whole, head_dim):
                _wide_rest(sums, shrink, kv, block, block_at, to_values, head_dim, scores, d, num_keys, num_vectors)
        first_key += num_keys


@numba.njit(nogil=True)
def _merge(
    task: _Array, head: int, group: int, exact: bool, sums: _Array, peaks: _Array, totals: _Array, out: _Array
) -> None:
    """Merges the splits of a tile: sums [splits, head_dim * rows or more], peaks and totals [splits, rows or more]."""
    first_query, first_row, num_rows = task[1], task[2], task[3]
    num_splits, head_dim = sums.shape[0], out.shape[2]
    narrow, lanes = is_narrow(num_rows, head_dim, exact), _num_vectors(num_rows) * LANES
    weights = np.zeros((num_splits, lanes), np.float32)
    for row in range(num_rows):
        best = peaks[0, row]
        for split in range(1, num_splits):
            best = max(best, peaks[split, row])
        norm = np.float32(0)
        for split in range(num_splits):
            weights[split, row] = np.exp2(peaks[split, row] - best)
            norm += weights[split, row] * totals[split, row]
        for split in range(num_splits):
            weights[split, row] /= norm

    merged = np.zeros(NARROW_ROWS * head_dim if narrow else lanes * head_dim, np.float32)
    for split in range(num_splits):
        if narrow:
            for row in range(num_rows):
                weight = weights[split, row]
                for at in range(row * head_dim, (row + 1) * head_dim):
                    merged[at] += weight * sums[split, at]
        else:
            for d in range(head_dim):
                for row in range(lanes):
                    merged[d * lanes + row] += weights[split, row] * sums[split, d * lanes + row]
    for row in range(num_rows):
        query, query_head = first_query + (first_row + row) // group, head * group + (first_row + row) % group
        for d in range(head_dim):
            out[query, query_head, d] = merged[row * head_dim + d if narrow else d * lanes + row]


@numba.njit(nogil=True, parallel=True, cache=True)
def append_and_attend(
    q: _Array,
    k: _Array,
    v: _Array,
    kv: _Array,
    scales: _Array,
    slots: _Array,
    page_ids: _Array,
    page_indptr: _Array,
    tasks: _Array,
    tile_indptr: _Array,
    scale: np.float32,
    window: int,
    exact: bool,
    out: _Array,
    sums: _Array,
    peaks: _Array,
    totals: _Array,
) -> None:
    """Three parallel loops: new keys and values into their pages, all tasks, the splits of all tiles."""
    num_kv_heads, page_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    to_values = num_kv_heads * page_size * head_dim
    for vector in numba.prange(k.shape[0] * num_kv_heads):
        token, head = vector // num_kv_heads, vector % num_kv_heads
        page, offset = slots[token] // page_size, slots[token] % page_size
        at = ((2 * page * num_kv_heads + head) * page_size + offset) * head_dim
        _pack(kv, scales, at, k, vector * head_dim, head_dim)
        _pack(kv, scales, at + to_values, v, vector * head_dim, head_dim)

    for part in numba.prange(tasks.shape[0] * num_kv_heads):
        index, head = part // num_kv_heads, part % num_kv_heads
        task = tasks[index]
        pages = page_ids[page_indptr[task[0]] :]
        sums_len = head_dim * (NARROW_ROWS if is_narrow(task[3], head_dim, exact) else _num_vectors(task[3]) * LANES)
        results = sums[head, index, :sums_len], peaks[head, index], totals[head, index]
        _attend(q, kv, scales, pages, head, task, scale, window, exact, *results)

    for part in numba.prange((tile_indptr.shape[0] - 1) * num_kv_heads):
        tile, head = part // num_kv_heads, part % num_kv_heads
        splits = slice(tile_indptr[tile], tile_indptr[tile + 1])
        task = tasks[tile_indptr[tile]]
        _merge(task, head, group, exact, sums[head, splits], peaks[head, splits], totals[head, splits], out)
