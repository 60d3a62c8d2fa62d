"""The kernels of native attention, compiled by Numba; `attention` describes the algorithm and plans their work.

The arithmetic on a block of keys is in `attention_products`, what it reads in `attention_panels`, and how pages are
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
from microturn.model.cpu import attention_panels as panels
from microturn.model.cpu import attention_products as products
from microturn.model.cpu.attention_panels import KEY_BLOCK
from microturn.model.cpu.attention_products import NO_SCORE, ROWS_AT_ONCE
from microturn.model.cpu.vectors import LANES

# So many new tokens are written by one thread: waking another takes longer.
_FEW_VECTORS = 32

HALF_BLOCK = KEY_BLOCK // 2
_MANY_VECTORS = 4
_NO_SCORE = np.float32(NO_SCORE)

# The kernels take arrays of Numba's kind; their types are inferred at the first call.
_Array = NDArray[Any]

_pack = packing.pack()
_pack_keys = panels.pack_keys()
_pack_values = panels.pack_values()
_pack_queries = panels.pack_queries()
_prefetch = panels.prefetch()
_scores = products.scores()
_softmax = products.softmax()
_values = products.values(_MANY_VECTORS)
_values_rest = products.values(1)
_merge = products.merge()


@numba.njit(nogil=True)
def _attend(
    q: _Array,
    kv: _Array,
    scales: _Array,
    head: int,
    task: _Array,
    key_at: _Array,
    num_next: int,
    scale: np.float32,
    window: int,
    operands: _Array,
    num_terms: int,
    sums: _Array,
    peak: _Array,
    total: _Array,
) -> None:
    """One task: attends its keys. Writes sums [rows * padded_dim], peak and total [rows].

    Args:
        key_at: of its keys and of those that the thread attends next; the latter are prefetched.
        num_next: how many these are.
    """
    first_row, num_rows, position = task[2], task[3], task[4]
    key_start, key_end, first_query, phase = task[5], task[6], task[7], task[8]
    num_kv_heads, page_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    to_values = num_kv_heads * page_size
    keys = kv.reshape(-1)[head * page_size * head_dim :]
    values = keys[to_values * head_dim :]
    padded_dim = head_dim + -head_dim % (num_terms * LANES)
    num_lanes = padded_dim // num_terms
    _prefetch(keys, key_at, head_dim, min(KEY_BLOCK, key_end - key_start))

    floats = np.zeros(num_rows * padded_dim, np.float32)
    for row in range(num_rows):
        query, query_head = first_query + (first_row + row) // group, head * group + (first_row + row) % group
        for d in range(head_dim):
            floats[row * padded_dim + d] = q[query, query_head, d] * scale
    queries = np.empty(num_rows * num_lanes, operands.dtype)
    _pack_queries(floats, queries, num_rows * padded_dim)

    for row in range(num_rows):
        peak[row] = _NO_SCORE
        total[row] = 0
    for at in range(num_rows * padded_dim):
        sums[at] = 0
    panel = np.empty(KEY_BLOCK * num_lanes, operands.dtype)
    scores = np.empty(num_rows * KEY_BLOCK, np.float32)
    weights = np.empty(num_rows * KEY_BLOCK // num_terms, operands.dtype)
    block_scales = np.zeros(2 * KEY_BLOCK, np.float32)
    shrink = np.empty(num_rows, np.float32)
    first_key = key_start
    while first_key < key_end:
        num_keys = min(KEY_BLOCK - (first_key + phase) % KEY_BLOCK, key_end - first_key)
        block_at = key_at[first_key - key_start :]
        next_at = block_at[num_keys:]
        num_ahead = max(1, min(KEY_BLOCK, key_end - first_key - num_keys + num_next))
        _pack_keys(keys, block_at, head_dim, num_keys, panel, values, block_at, head_dim, 0, num_keys - 1)
        for row in range(0, num_rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, num_rows - row)
            last = num_keys - 1 if row == 0 else 0
            _scores(scores, panel, queries, row, count, num_lanes, values, block_at, head_dim, HALF_BLOCK, last)

        if scales.shape[0] > 0:
            for t in range(num_keys):
                block_scales[t] = scales[block_at[t] + head * page_size]
                block_scales[KEY_BLOCK + t] = scales[block_at[t] + head * page_size + to_values]
            for t in range(num_keys, KEY_BLOCK):
                block_scales[KEY_BLOCK + t] = 0
        for row in range(num_rows):
            newest = position + (first_row + row) // group
            first = min(max(0, newest - window + 1 - first_key), num_keys)
            end = max(first, min(num_keys, newest + 1 - first_key))
            _softmax(kv, scores, weights, row, first, end, block_scales, peak, total, shrink)

        last = num_ahead - 1
        _pack_values(values, block_at, head_dim, num_keys, panel, padded_dim, keys, next_at, head_dim, 0, last)
        ahead = keys, next_at, head_dim, HALF_BLOCK
        for row in range(0, num_rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, num_rows - row)
            last = num_ahead - 1 if row == 0 else 0
            whole = padded_dim - padded_dim % (_MANY_VECTORS * LANES)
            for d in range(0, whole, _MANY_VECTORS * LANES):
                _values(sums, shrink, panel, weights, row, count, d, padded_dim, num_keys, *ahead, last)
            for d in range(whole, padded_dim, LANES):
                _values_rest(sums, shrink, panel, weights, row, count, d, padded_dim, num_keys, *ahead, last)
        first_key += num_keys


@numba.njit(nogil=True)
def _write_out(task: _Array, head: int, group: int, padded_dim: int, sums: _Array, total: _Array, out: _Array) -> None:
    """Writes the weighted mean of a tile's values."""
    first_query, first_row, num_rows = task[1], task[2], task[3]
    for row in range(num_rows):
        query, query_head = first_query + (first_row + row) // group, head * group + (first_row + row) % group
        norm = np.float32(1) / total[row]
        for d in range(out.shape[2]):
            out[query, query_head, d] = sums[row * padded_dim + d] * norm


@numba.njit(nogil=True, parallel=True, cache=True)
def append_and_attend(
    q: _Array,
    k: _Array,
    v: _Array,
    out: _Array,
    kv: _Array,
    scales: _Array,
    scale: np.float32,
    slots: _Array,
    key_at: _Array,
    row_starts: _Array,
    tasks: _Array,
    units: _Array,
    thread_indptr: _Array,
    merges: _Array,
    sums: _Array,
    peaks: _Array,
    totals: _Array,
    window: int,
    operands: _Array,
    num_terms: int,
) -> None:
    """Writes new keys and values into their pages, attends all units, and merges the results of divided tiles.

    See `attention._Work` for the arrays of the plan, and `attention_operands` for operands and their terms; `scales`
    is flat.
    """
    num_kv_heads, page_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    group = q.shape[1] // num_kv_heads
    to_values = num_kv_heads * page_size * head_dim
    padded_dim = head_dim + -head_dim % (num_terms * LANES)
    num_vectors = k.shape[0] * num_kv_heads
    if num_vectors <= _FEW_VECTORS:
        for vector in range(num_vectors):
            _append(k, v, kv, scales, slots, vector, to_values)
    else:
        for vector in numba.prange(num_vectors):
            _append(k, v, kv, scales, slots, vector, to_values)

    for thread in numba.prange(thread_indptr.shape[0] - 1):
        for number in range(thread_indptr[thread], thread_indptr[thread + 1]):
            first, end, result, head = units[number, 0], units[number, 1], units[number, 2], units[number, 3]
            num_rows = tasks[first, 3]
            row_start = row_starts[tasks[first, 0]]
            whole = (
                np.empty(num_rows * padded_dim, np.float32),
                np.empty(num_rows, np.float32),
                np.empty(num_rows, np.float32),
            )
            split = np.empty_like(whole[0]), np.empty_like(whole[1]), np.empty_like(whole[2])
            for place in range(first, end):
                if result >= 0:
                    index = result + place - first
                    target = sums[head, index], peaks[head, index], totals[head, index]
                elif place == first:
                    target = whole
                else:
                    target = split
                task = tasks[place]
                num_next = tasks[end - 1, 6] - task[6]
                keys_at = key_at[row_start + task[5] :]
                _attend(q, kv, scales, head, task, keys_at, num_next, scale, window, operands, num_terms, *target)
                if result < 0 and place > first:
                    for row in range(num_rows):
                        _merge(*whole, *split, row, padded_dim)
            if result < 0:
                _write_out(tasks[first], head, group, padded_dim, whole[0], whole[2], out)

    if merges.shape[0] > 0:
        for part in numba.prange(merges.shape[0] * num_kv_heads):
            index, head = part // num_kv_heads, part % num_kv_heads
            task = tasks[merges[index, 0]]
            first, end = merges[index, 1], merges[index, 2]
            merged = sums[head, first], peaks[head, first], totals[head, first]
            for number in range(first + 1, end):
                split = sums[head, number], peaks[head, number], totals[head, number]
                for row in range(task[3]):
                    _merge(*merged, *split, row, padded_dim)
            _write_out(task, head, group, padded_dim, merged[0], merged[2], out)


@numba.njit(nogil=True)
def _append(k: _Array, v: _Array, kv: _Array, scales: _Array, slots: _Array, vector: int, to_values: int) -> None:
    """Writes one head's key and value of one token; vectors are counted token by token."""
    num_kv_heads, page_size, head_dim = kv.shape[2], kv.shape[3], kv.shape[4]
    token, head = vector // num_kv_heads, vector % num_kv_heads
    page, offset = slots[token] // page_size, slots[token] % page_size
    at = ((2 * page * num_kv_heads + head) * page_size + offset) * head_dim
    _pack(kv, scales, at, k, vector * head_dim, head_dim)
    _pack(kv, scales, at + to_values, v, vector * head_dim, head_dim)
