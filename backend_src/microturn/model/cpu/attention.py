"""Native paged attention: one call computes all rows of a step, without copying any context.

The rows of a *tile* are a session's new queries times the query heads that share a KV head, up to 64 rows: an append of
16 tokens with three heads per KV head reads each key once. A tile's keys are divided into *splits*, each a *task*::

    keys    0                                            newest + 1
            |  split 0   |  split 1   |  split 2   |  split 3  |     at multiples of 256 of the keys' positions
                         |            |
                         +--+--+--+--+   blocks of 64 keys, at multiples of 64, found through the page table.
                         |  |  |  |  |   For each of them:
                         +--+--+--+--+   scores = queries x keys           [rows, 64]
                                         peak, total, weights = softmax    [rows], [rows], [rows, 64]
                                         sums = shrink * sums + weights x values    [rows, head_dim]

Finally the splits are merged in order: sums and totals, weighted by 2 ** (peak - highest peak).

This is an online softmax (Milakov and Gimelshein, 2018) over tiles as in FlashAttention (Dao et al., 2022), split over
keys as in Flash-Decoding (Dao et al., 2023). Splits and blocks lie at fixed positions, and each row adds up its own
sums, key by key: so **a query's result depends to the bit only on the tokens that it sees**, and not on how a session
is divided into steps, what else is in the batch, or how the work is divided among threads. (Batch invariance, as in He
et al., "Defeating Nondeterminism in LLM Inference", 2025.)

Threads take *units*: a whole tile of one KV head, whose splits are merged at once, or some splits of a tile that would
keep a thread busy for longer than the others; their results are kept until all are there.

Threads: Numba's OpenMP layer binds to the OpenMP runtime that torch has loaded, so that both share one team. Its other
layers have their own threads, which compete with torch's spinning ones: measured twice as slow on two cores.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any, Self

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PANEL_ELEMENTS, PANEL_TOKENS
from microturn.kv.tensors import LayerPages
from microturn.model.cpu.attention_kernels import append_and_attend
from microturn.model.cpu.attention_operands import MAX_TERMS, lanes_of
from microturn.model.cpu.attention_panels import KEY_BLOCK
from microturn.model.cpu.vectors import LANES
from microturn.model.paged_step import Int32Array, PagedStep

# Most rows of a tile: with head_dim 64 queries and sums take up to 32 KiB of the L2 cache.
TILE_ROWS = 64

# Keys of a split: few enough that one session occupies several threads.
SPLIT_LEN = 256

# A key costs as much to read as so many rows to compute with it.
_KEY_COST = 4

# Tiles are divided into so many units at least, as far as they have splits, so that all threads have as much to do.
_UNITS_PER_THREAD = 4

_UNBOUNDED = 2**30
_LOG2_E = math.log2(math.e)

_Task = tuple[int, ...]
_Unit = tuple[int, int, int, int]


def unavailable_reason(page_size: int = PANEL_TOKENS, layers: Sequence[LayerShape] = ()) -> str | None:
    """Why this kernel cannot run here, or not over such pages, or None when it can."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        return f"Numba's OpenMP layer does not load ({error}); install libgomp1 for faster attention"
    if page_size % PANEL_TOKENS:
        return f"page_size {page_size} is no multiple of {PANEL_TOKENS}"
    others = [layer.head_dim for layer in layers if layer.head_dim % PANEL_ELEMENTS]
    return f"heads of {others[0]} elements, no multiple of {PANEL_ELEMENTS}" if others else None


@dataclass(frozen=True)
class _Shape:
    """What determines how rows are divided; most layers of a model have the same shape."""

    num_kv_heads: int
    group: int
    head_dim: int
    window: int


@dataclass(frozen=True)
class _Work:
    """The work of one step in all layers of a shape, and memory for its results.

    Attributes:
        tasks: int32 [tasks, 9]: row of the batch; its first query (packed); first of the tile's rows, counted from
            there; number of these rows; where the first query's own key is among the row's; first key; end of the keys;
            the first query as these keys see it; the position of the row's key 0. The splits of a tile are consecutive,
            in the order of their keys. For moved sinks the rotated queries follow all other queries.
        units: int32 [units, 4]: first task, end of the tasks, place of the first one's result, or -1 for a whole tile,
            and KV head. The units of a thread are consecutive.
        thread_indptr: int32 [threads + 1], bounds of the threads' units.
        merges: int32 [divided tiles, 3]: first task, and the places of the first result and behind the last one.
        sums: float32 [kv_heads, results, rows * padded_dim or more], weighted values.
        peaks: float32 [kv_heads, results, rows or more], highest scores.
        totals: float32 [kv_heads, results, rows or more], sums of weights.
    """

    tasks: Int32Array
    units: Int32Array
    thread_indptr: Int32Array
    merges: Int32Array
    sums: NDArray[np.float32]
    peaks: NDArray[np.float32]
    totals: NDArray[np.float32]

    @classmethod
    def plan(cls, step: PagedStep, shape: _Shape) -> Self:
        tiles = list(_tiles(step, shape))
        num_threads = numba.get_num_threads()
        most_cost = sum(map(_cost, tiles)) * shape.num_kv_heads / (_UNITS_PER_THREAD * num_threads)
        tasks: list[_Task] = []
        units: list[tuple[int, _Unit]] = []
        merges: list[tuple[int, int, int]] = []
        num_results = most_rows = 0
        for tile in tiles:
            first = len(tasks)
            tasks += tile
            num_splits = min(len(tile), math.ceil(most_cost and _cost(tile) / most_cost))
            if num_splits <= 1:
                units += [(_cost(tile), (first, len(tasks), -1, head)) for head in range(shape.num_kv_heads)]
                continue
            for begin, end in pairwise(len(tile) * split // num_splits for split in range(num_splits + 1)):
                unit = first + begin, first + end, num_results + begin
                units += [(_cost(tile[begin:end]), (*unit, head)) for head in range(shape.num_kv_heads)]
            merges.append((first, num_results, num_results + len(tile)))
            num_results += len(tile)
            most_rows = max(most_rows, tile[0][3])
        shares = _shares(units, num_threads)
        padded_dim = shape.head_dim + -shape.head_dim % (MAX_TERMS * LANES)
        results = shape.num_kv_heads, num_results
        return cls(
            np.array(tasks, np.int32),
            np.array([unit for share in shares for unit in share], np.int32),
            np.cumsum([0, *map(len, shares)]).astype(np.int32),
            np.array(merges, np.int32).reshape(-1, 3),
            np.empty((*results, most_rows * padded_dim), np.float32),
            np.empty((*results, most_rows), np.float32),
            np.empty((*results, most_rows), np.float32),
        )


def _cost(tasks: Sequence[_Task]) -> int:
    """Of one head: reading a key costs as much as computing some rows."""
    return sum((task[6] - task[5]) * (_KEY_COST + task[3]) for task in tasks)


def _shares(units: list[tuple[int, _Unit]], num_threads: int) -> list[list[_Unit]]:
    """Divides units with their costs among threads: each in turn, the largest first, to the one with the least."""
    shares: list[list[_Unit]] = [[] for _ in range(num_threads)]
    loads = [0] * num_threads
    for cost, unit in sorted(units, key=itemgetter(0), reverse=True):
        least = loads.index(min(loads))
        shares[least].append(unit)
        loads[least] += cost
    return shares


def _tiles(step: PagedStep, shape: _Shape) -> Iterator[list[_Task]]:
    """The tasks of each tile."""
    turned = int(step.query_indptr[-1])
    for row in range(len(step.context_len)):
        start, end = int(step.query_indptr[row]), int(step.query_indptr[row + 1])
        position = int(step.context_len[row]) - (end - start)
        num_sinks, num_evicted = int(step.num_sinks[row]), int(step.num_evicted[row])
        num_rows = (end - start) * shape.group
        for first in range(0, num_rows, TILE_ROWS):
            num = min(TILE_ROWS, num_rows - first)
            oldest = max(0, position + first // shape.group - shape.window + 1)
            key_end = position + (first + num - 1) // shape.group + 1
            tile = row, start, first, num, position
            tasks: list[_Task] = []
            if oldest < num_sinks:
                tasks.append((*tile, 0, num_sinks, turned, 0))
                oldest = num_sinks
            borders = _borders(oldest, key_end, num_sinks, num_evicted)
            tasks += [(*tile, first_key, last_key, start, num_evicted) for first_key, last_key in pairwise(borders)]
            yield tasks
        turned += end - start if num_sinks else 0


def _borders(oldest: int, key_end: int, num_sinks: int, num_evicted: int) -> list[int]:
    """Bounds of splits, from the block of the oldest key on.

    Keys of a tile that one of its queries does not see have a weight of exactly 0.
    """
    first = max(num_sinks, oldest - (oldest + num_evicted) % KEY_BLOCK)
    next_split = first + SPLIT_LEN - (first + num_evicted) % SPLIT_LEN
    return [first, *range(next_split, key_end, SPLIT_LEN), key_end]


class NativePlan:
    """The work of one step for one kind of layers, planned at the first layer of each shape.

    Args:
        steps: the page tables of the batch, for each group of the layers.
    """

    def __init__(self, steps: Sequence[PagedStep]) -> None:
        self._steps = steps
        self._work: dict[_Shape, _Work] = {}
        # Per group, heads and window of a layer. A small model's layer takes 200 us, and to find these anew 15 of them.
        self._arguments: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def append_and_attend(
        self, group: int, q: Tensor, k: Tensor, v: Tensor, kv: LayerPages, scale: float, window: int | None, out: Tensor
    ) -> None:
        """Writes the new keys and values of a layer, then computes the attention of all rows.

        Shapes: q [tokens and rotated ones, heads, head_dim]; out [tokens, heads, head_dim]; k and v [tokens, kv_heads,
        head_dim].
        """
        key = group, q.shape[1], k.shape[1], k.shape[2], window
        arguments = self._arguments.get(key)
        if arguments is None:
            arguments = self._arguments[key] = self._find_arguments(*key, kv)
        append_and_attend(
            q.numpy(), k.numpy(), v.numpy(), out.numpy(), *kv.arrays, np.float32(scale * _LOG2_E), *arguments
        )

    def _find_arguments(
        self, group: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, kv: LayerPages
    ) -> tuple[Any, ...]:
        """What the kernel needs of the step, the work and the pages' type."""
        shape = _Shape(num_kv_heads, num_heads // num_kv_heads, head_dim, _UNBOUNDED if window is None else window)
        if shape not in self._work:
            self._work[shape] = _Work.plan(self._steps[0], shape)
        work, step = self._work[shape], self._steps[group]
        return (
            step.slots,
            step.page_size,
            step.page_ids,
            step.page_indptr,
            work.tasks,
            work.units,
            work.thread_indptr,
            work.merges,
            work.sums,
            work.peaks,
            work.totals,
            shape.window,
            *lanes_of(kv.arrays[0]),
            kv.layout.terms(kv.elements.dtype),
        )


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of this kernel for the calling thread, and selects the OpenMP layer that torch uses."""
    numba.config.THREADING_LAYER = "omp"
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
