"""The kernels of native attention, compiled by Numba; `attention` describes the algorithm, `attention_work` divides it.

The arithmetic on a block of keys is in `attention_products` and `attention_softmax`, where it is in `attention_pages`,
how it is read in `attention_panels`, how pages are written in `attention_packing`, and how queries are made ready in
`attention_queries`.

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
from microturn.model.cpu import attention_softmax as softmax
from microturn.model.cpu.attention_operands import padded
from microturn.model.cpu.attention_pages import PageShape, locate, shape_of, starts_of
from microturn.model.cpu.attention_panels import KEY_BLOCK
from microturn.model.cpu.attention_products import ROWS_AT_ONCE, VECTORS_AT_ONCE
from microturn.model.cpu.attention_queries import TileMemory, new_memory, new_result, query_of, ready_queries
from microturn.model.cpu.attention_queue import Queue, pages_of, take_unit
from microturn.model.cpu.attention_scores import KernelScores, norm_of
from microturn.model.cpu.attention_work import Tables, Work
from microturn.model.cpu.kernel_cache import kernel
from microturn.model.cpu.rotation import rotate_row
from microturn.model.cpu.self_scheduling import take
from microturn.model.cpu.vectors import LANES

# Up to so many vectors, of tokens times heads, are written by one thread: waking another takes longer.
_FEW_VECTORS = 32

# A thread takes its next unit during the last block of one with at least so many keys. Of shorter ones it would have
# two while another thread has none.
_LONG_UNIT = 4 * KEY_BLOCK

_NO_SCORE = np.float32(softmax.NO_SCORE)

# The kernels take arrays of Numba's kind; their types are inferred at the first call.
_Array = NDArray[Any]

_pack_key = packing.pack(together=True)
_pack_value = packing.pack(together=False)
_prefetch_scales = panels.prefetch_scales()
_scores = products.scores()
_softmax = softmax.softmax()
_capped_softmax = softmax.softmax(is_capped=True)
_values = products.values(VECTORS_AT_ONCE)
_values_rest = products.values(1)
_values_part = products.values(1, is_part=True)
_merge = products.merge()


@numba.njit(nogil=True)
def _attend(
    kv: _Array,
    scales: _Array,
    of: PageShape,
    first_head: int,
    num_heads: int,
    queue: Queue,
    task: _Array,
    keys_end: int,
    is_followed: bool,
    window: int,
    padded_dim: int,
    soft_cap: np.float32 | None,
    memory: TileMemory,
    sums: _Array,
    peak: _Array,
    total: _Array,
) -> int:
    """One task: attends its keys. Writes sums [heads * rows * padded_dim], peak and total [heads * rows].

    A block's keys and values of all heads are neighbours in memory: the CPU notices that they are read in turn, and
    reads more at once than it is asked to prefetch. During the last block of a unit that `is_followed` the thread takes
    its next unit, so that this one's first block is prefetched too.

    Args:
        of: the pages.
        first_head: of the unit's `num_heads`.
        keys_end: end of the unit's keys.
        soft_cap: see `KernelScores`.
        memory: with the task's queries ready.

    Returns:
        The number of the next unit, if the thread has taken it, or -1.
    """
    newest, first, end, at, next_at = memory.newest, memory.first, memory.end, memory.at, memory.next_at
    scores, weights, weight_scales, shrink = memory.scores, memory.weights, memory.weight_scales, memory.shrink
    of_queries = memory.queries, memory.query_scales, memory.offsets
    num_rows, key_start, key_end, phase = task[3], task[5], task[6], task[8]
    page_size, head_dim = of.page_size, of.head_dim
    num_lanes, stride, value_stride = head_dim // of.terms, page_size * of.terms, head_dim * of.terms
    head_len, to_values = page_size * head_dim, of.num_kv_heads * page_size
    pages, next_unit = pages_of(queue, task), -1
    locate(pages, key_start, key_end, of, first_head, at)
    for row in range(num_heads * num_rows):
        peak[row] = _NO_SCORE
        total[row] = 0
    for place in range(num_heads * num_rows * padded_dim):
        sums[place] = 0
    many = head_dim - head_dim % (VECTORS_AT_ONCE * LANES)
    whole = head_dim - head_dim % LANES
    first_key = key_start
    while first_key < key_end:
        num_keys = min(KEY_BLOCK - (first_key + phase) % KEY_BLOCK, key_end - first_key)
        next_key = first_key + num_keys
        has_next = next_key < keys_end
        if has_next:
            locate(pages, next_key, keys_end, of, first_head, next_at)
        elif is_followed:
            next_unit = take_unit(queue, of, next_at)
            has_next = next_unit < queue.units.shape[0]
        for head in range(num_heads):
            block = kv, at, head * head_len, stride, value_stride
            of_scales = scales, head * page_size, to_values + head * page_size
            if has_next:
                _prefetch_scales(kv, next_at, *of_scales)
            first_row, end_row = head * num_rows, (head + 1) * num_rows
            for row in range(first_row, end_row, ROWS_AT_ONCE):
                count, fetches = min(ROWS_AT_ONCE, end_row - row), has_next and row == first_row
                _scores(scores, *block, next_at, *of_queries, row, count, num_lanes, padded_dim, fetches)
                for some in range(row, row + count):
                    first[some] = min(max(0, newest[some] - window + 1 - first_key), num_keys)
                    end[some] = max(first[some], min(num_keys, newest[some] + 1 - first_key))
                seen, made = (row, count, first, end), (weights, weight_scales)
                of_scores = scores, *block, next_at, *made, *seen, *of_scales, peak, total, shrink, num_lanes, fetches
                if soft_cap is None:
                    _softmax(*of_scores)
                else:
                    _capped_softmax(*of_scores, soft_cap)
                of_rows = sums, *block, next_at, shrink, weights, weight_scales, row, count
                for d in range(0, many, VECTORS_AT_ONCE * LANES):
                    _values(*of_rows, d, padded_dim, num_keys, fetches)
                for d in range(many, whole, LANES):
                    _values_rest(*of_rows, d, padded_dim, num_keys, fetches)
                if whole < head_dim:
                    _values_part(*of_rows, whole, padded_dim, num_keys, fetches, head_dim - whole)
        first_key = next_key
        at, next_at = next_at, at
    return next_unit


# A row without any weight is not a number; Python's way would fail the whole step.
@numba.njit(nogil=True, error_model="numpy")
def _write_out(
    task: _Array,
    first_head: int,
    num_heads: int,
    group: int,
    padded_dim: int,
    sink_logits: _Array | None,
    sums: _Array,
    peak: _Array,
    total: _Array,
    out: _Array,
) -> None:
    """Writes the weighted mean of a tile's values, whose splits are merged."""
    for row in range(num_heads * task[3]):
        token, query_head = query_of(row, task, first_head, group)
        norm = norm_of(peak[row], total[row], sink_logits, query_head)
        for d in range(out.shape[2]):
            out[task[1] + token, query_head, d] = sums[row * padded_dim + d] * norm


@kernel(parallel=True)
def append_and_attend(
    q: _Array,
    k: _Array,
    v: _Array,
    out: _Array,
    kv: _Array,
    scales: _Array,
    scores: KernelScores,
    tables: Tables,
    group_of_layer: int,
    work: Work,
) -> None:
    """Writes new keys and values into their pages, and attends all units; who ends a tile's last one merges them.

    Args:
        q: float32 [tokens and rotated ones, heads, head_dim].
        k: float32 [tokens, kv_heads, head_dim]; `v` likewise.
        out: float32 [tokens, heads, head_dim], written.
        kv: the pages of the layer, flat; `scales` likewise.
        scores: of the layer.
        tables: of the layer's kind.
        group_of_layer: the layer's group.
        work: of the layer's shape.
    """
    # A parallel loop takes arrays, but no tuples.
    scale, soft_cap, sink_logits = scores
    tasks, units, counters, num_threads, sums, peaks, totals, most_rows, window = work
    slots, page_ids = tables.slots[group_of_layer], tables.page_ids[group_of_layer]
    page_indptr, page_size = tables.page_indptr, tables.page_size
    num_kv_heads, head_dim = k.shape[1], k.shape[2]
    group = q.shape[1] // num_kv_heads
    padded_dim = padded(head_dim)
    num_vectors = k.shape[0] * num_kv_heads
    if num_vectors <= _FEW_VECTORS:
        for vector in range(num_vectors):
            _append(k, v, kv, scales, slots, page_size, vector)
    else:
        for vector in numba.prange(num_vectors):
            _append(k, v, kv, scales, slots, page_size, vector)

    for index in range(counters.shape[0]):
        counters[index] = 0
    # Each array of this loop costs it 0.7 µs.
    for _ in numba.prange(num_threads):
        of = shape_of(kv, scales, page_size, num_kv_heads, head_dim)
        memory = new_memory(kv, most_rows, head_dim, padded_dim)
        whole, split = new_result(most_rows, padded_dim), new_result(most_rows, padded_dim)
        none = np.int32(-1)
        ready = none, none, none, none
        queue = Queue(counters, units, tasks, page_ids, page_indptr)
        number = take_unit(queue, of, memory.at)
        while number < units.shape[0]:
            first, end, result = units[number, 0], units[number, 1], units[number, 4]
            heads = units[number, 2], units[number, 3]
            keys_end, next_number = tasks[end - 1, 6], -1
            is_followed = keys_end - tasks[first, 5] >= _LONG_UNIT
            for place in range(first, end):
                task = tasks[place]
                # Keys of moved sinks are seen by the rotated queries, other keys by the queries as they are. A thread
                # often takes several units of a tile, which have the same queries.
                queries = task[2], task[7], *heads
                if queries != ready:
                    ready = queries
                    ready_queries(q, kv, num_kv_heads, *heads, task, scale, scales.shape[0] > 0, padded_dim, memory)
                if result >= 0:
                    index = result + place - first
                    target = sums[index], peaks[index], totals[index]
                elif place == first:
                    target = whole
                else:
                    target = split
                of_task = task, keys_end, is_followed, window, padded_dim, soft_cap
                next_number = _attend(kv, scales, of, *heads, queue, *of_task, memory, *target)
                if result < 0 and place > first:
                    _merge_rows(*whole, *split, heads[1] * task[3], padded_dim)
            if result < 0:
                _write_out(tasks[first], *heads, group, padded_dim, sink_logits, *whole, out)
            elif take(counters, 1 + units[number, 7]) == units[number, 8] - 1:
                tile_first, tile_end = units[number, 5], units[number, 6]
                first_result, task = result - (first - tile_first), tasks[tile_first]
                merged = sums[first_result], peaks[first_result], totals[first_result]
                for index in range(first_result + 1, first_result + tile_end - tile_first):
                    _merge_rows(*merged, sums[index], peaks[index], totals[index], heads[1] * task[3], padded_dim)
                _write_out(task, *heads, group, padded_dim, sink_logits, *merged, out)
            number = next_number if next_number >= 0 else take_unit(queue, of, memory.at)


@numba.njit(nogil=True)
def _merge_rows(
    sums: _Array,
    peak: _Array,
    total: _Array,
    other_sums: _Array,
    other_peak: _Array,
    other_total: _Array,
    num_rows: int,
    padded_dim: int,
) -> None:
    """Adds the next split's result to that of the splits before it."""
    for row in range(num_rows):
        _merge(sums, peak, total, other_sums, other_peak, other_total, row, padded_dim)


@numba.njit(nogil=True)
def _append(k: _Array, v: _Array, kv: _Array, scales: _Array, slots: _Array, page_size: int, vector: int) -> None:
    """Writes one head's key and value of one token; vectors are counted token by token."""
    num_kv_heads, head_dim = k.shape[1], k.shape[2]
    of = shape_of(kv, scales, page_size, num_kv_heads, head_dim)
    terms = of.terms
    token, head = vector // num_kv_heads, vector % num_kv_heads
    page, offset = slots[token] // page_size, slots[token] % page_size
    keys, values, key_scales, value_scales = starts_of(page, head, of)
    at, scale_at = keys + offset * terms, key_scales + offset
    if of.scales_len:
        key = np.empty(head_dim, np.float32)
        rotate_row(k[token, head], key)
        _pack_key(kv, scales, at, scale_at, key, 0, head_dim, page_size * terms)
    else:
        _pack_key(kv, scales, at, scale_at, k, vector * head_dim, head_dim, page_size * terms)
    at = values + offset // terms * terms * head_dim + offset % terms
    _pack_value(kv, scales, at, value_scales + offset, v, vector * head_dim, head_dim, terms)
