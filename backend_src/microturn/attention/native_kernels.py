"""The kernels of native attention, compiled by Numba; `native` has the algorithm's picture and plans their tasks.

They know tasks, pages and rows; the arithmetic on a block of keys is in `native_products`. Numba's cache of compiled
code watches this file alone: touch it after a change there.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.attention import native_products as products
from microturn.attention.native_products import CACHE_LINE, MAX_VECTORS, NARROW_BLOCK, NARROW_ROWS, WIDE_BLOCK
from microturn.attention.native_vectors import LANES

# Rows of a tile, at most: what the block of sums in registers is wide.
TILE_ROWS = MAX_VECTORS * LANES

# Keys whose scores are kept at a time: with 48 rows and head_dim 64, scores, queries and sums fill 36 KiB of cache.
KEY_BLOCK = 64

# A masked score lies so far below the start of the peak that its weight is 0 even where all keys so far are masked.
_MASKED = np.float32(-3e38)
_NO_SCORE = np.float32(-1e30)

# The kernels take arrays of Numba's kind; their types are inferred at the first call.
_Array = NDArray[Any]

_prefetch = products.prefetch()
_softmax = products.softmax()
_narrow_scores = products.narrow_scores()
_narrow_values = products.narrow_values(NARROW_BLOCK)
_narrow_rest = products.narrow_values(1)
_wide_scores = products.wide_scores()
_wide_values = products.wide_values(WIDE_BLOCK)
_wide_rest = products.wide_values(1)


@numba.njit(nogil=True)
def is_narrow(num_rows: int, head_dim: int) -> bool:
    """Which of the two layouts a tile has."""
    return num_rows <= NARROW_ROWS and head_dim % LANES == 0


@numba.njit(nogil=True)
def _num_vectors(num_rows: int) -> int:
    return (num_rows + LANES - 1) // LANES


@numba.njit(nogil=True)
def _fetch(elements: _Array, key_at: _Array, num_keys: int, shift: int, head_dim: int) -> None:
    for t in range(num_keys):
        for d in range(0, head_dim, CACHE_LINE):
            _prefetch(elements, key_at[t] + shift + d)


@numba.njit(nogil=True)
def _attend(
    q: _Array,
    kv: _Array,
    pages: _Array,
    head: int,
    task: _Array,
    scale: np.float32,
    window: int,
    sums: _Array,
    peak: _Array,
    total: _Array,
) -> None:
    """One task: adds its keys to sums [head_dim, rows], in a narrow tile [rows, head_dim], and to peak and total."""
    first_row, num_rows, position, key_start, key_end, first_query = task[2:8]
    page_size, num_kv_heads, head_dim = kv.shape[2:]
    group = q.shape[1] // num_kv_heads
    elements = kv.reshape(-1)
    token_len = num_kv_heads * head_dim
    to_values = page_size * token_len
    narrow, num_vectors = is_narrow(num_rows, head_dim), _num_vectors(num_rows)
    row_stride, element_stride = (head_dim, 1) if narrow else (1, num_vectors * LANES)

    # Where each key is; the last one stands in for those behind it, so that all blocks are whole.
    key_at = np.empty(key_end - key_start + KEY_BLOCK, np.int64)
    page, offset = key_start // page_size, key_start % page_size
    for t in range(key_end - key_start):
        key_at[t] = (2 * np.int64(pages[page]) * page_size + offset) * token_len + head * head_dim
        offset += 1
        if offset == page_size:
            page, offset = page + 1, 0
    key_at[key_end - key_start :] = key_at[key_end - key_start - 1]
    _fetch(elements, key_at, min(KEY_BLOCK, key_end - key_start), 0, head_dim)
    if narrow:
        _fetch(elements, key_at, min(KEY_BLOCK, key_end - key_start), to_values, head_dim)

    queries = np.zeros(sums.shape[0], np.float32)
    for row in range(num_rows):
        query = q[first_query + (first_row + row) // group, head * group + (first_row + row) % group]
        for d in range(head_dim):
            queries[row * row_stride + d * element_stride] = query[d] * scale
    oldest_query = position + first_row // group
    newest_query = position + (first_row + num_rows - 1) // group

    peak[:] = _NO_SCORE
    total[:] = 0
    sums[:] = 0
    scores = np.zeros((KEY_BLOCK, num_vectors * LANES), np.float32)
    shrink = np.empty(num_vectors * LANES, np.float32)
    for first_key in range(key_start, key_end, KEY_BLOCK):
        num_keys = min(KEY_BLOCK, key_end - first_key)
        block_at = key_at[first_key - key_start :]
        if narrow:
            for t in range(0, num_keys, NARROW_BLOCK):
                _fetch(elements, block_at[t + KEY_BLOCK :], NARROW_BLOCK, 0, head_dim)
                _narrow_scores(scores, elements, block_at, 0, queries, t, head_dim // LANES)
        else:
            for t in range(0, num_keys, WIDE_BLOCK):
                _fetch(elements, block_at[t:], WIDE_BLOCK, to_values, head_dim)
                _fetch(elements, block_at[t + KEY_BLOCK :], WIDE_BLOCK, 0, head_dim)
                _wide_scores(scores, elements, block_at, 0, queries, t, head_dim, num_vectors)

        if first_key + num_keys - 1 > oldest_query or first_key <= newest_query - window:
            for row in range(num_rows):
                newest = position + (first_row + row) // group
                for t in range(num_keys):
                    if not newest - window < first_key + t <= newest:
                        scores[t, row] = _MASKED

        _softmax(scores, peak, total, shrink, num_keys, num_vectors)

        step = NARROW_BLOCK * LANES if narrow else WIDE_BLOCK
        whole = head_dim - head_dim % step
        if narrow:
            for d in range(0, whole, step):
                _narrow_values(sums, shrink, elements, block_at, KEY_BLOCK, to_values, scores, d, num_keys, head_dim)
            for d in range(whole, head_dim, LANES):
                _narrow_rest(sums, shrink, elements, block_at, KEY_BLOCK, to_values, scores, d, num_keys, head_dim)
        else:
            for d in range(0, whole, step):
                _wide_values(sums, shrink, elements, block_at, to_values, scores, d, num_keys, num_vectors)
            for d in range(whole, head_dim):
                _wide_rest(sums, shrink, elements, block_at, to_values, scores, d, num_keys, num_vectors)


@numba.njit(nogil=True)
def _merge(task: _Array, head: int, group: int, sums: _Array, peaks: _Array, totals: _Array, out: _Array) -> None:
    """Merges the splits of a tile: sums [splits, head_dim * rows or more], peaks and totals [splits, rows or more]."""
    first_query, first_row, num_rows = task[1:4]
    num_splits, head_dim = sums.shape[0], out.shape[2]
    narrow, lanes = is_narrow(num_rows, head_dim), _num_vectors(num_rows) * LANES
    weights = np.zeros((num_splits, lanes), np.float32)
    for row in range(num_rows):
        best = peaks[:, row].max()
        norm = np.float32(0)
        for split in range(num_splits):
            weights[split, row] = np.exp2(peaks[split, row] - best)
            norm += weights[split, row] * totals[split, row]
        weights[:, row] /= norm

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
        result = out[first_query + (first_row + row) // group, head * group + (first_row + row) % group]
        for d in range(head_dim):
            result[d] = merged[row * head_dim + d if narrow else d * lanes + row]


@numba.njit(nogil=True, parallel=True, cache=True)
def append_and_attend(
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
    sums: _Array,
    peaks: _Array,
    totals: _Array,
) -> None:
    """Three parallel loops: new keys and values into their pages, all tasks, the splits of all tiles."""
    page_size, num_kv_heads, head_dim = kv.shape[2:]
    group = q.shape[1] // num_kv_heads
    for token in numba.prange(k.shape[0]):
        page, offset = slots[token] // page_size, slots[token] % page_size
        kv[page, 0, offset] = k[token]
        kv[page, 1, offset] = v[token]

    for part in numba.prange(tasks.shape[0] * num_kv_heads):
        index, head = part // num_kv_heads, part % num_kv_heads
        task = tasks[index]
        pages = page_ids[page_indptr[task[0]] :]
        sums_len = head_dim * (NARROW_ROWS if is_narrow(task[3], head_dim) else _num_vectors(task[3]) * LANES)
        results = sums[head, index, :sums_len], peaks[head, index], totals[head, index]
        _attend(q, kv, pages, head, task, scale, window, *results)

    for part in numba.prange((tile_indptr.shape[0] - 1) * num_kv_heads):
        tile, head = part // num_kv_heads, part % num_kv_heads
        splits = slice(tile_indptr[tile], tile_indptr[tile + 1])
        task = tasks[tile_indptr[tile]]
        _merge(task, head, group, sums[head, splits], peaks[head, splits], totals[head, splits], out)
