"""The work of one step of native attention, divided into tasks and units; `attention` describes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple, Self

import numba
import numpy as np
from numpy.typing import NDArray

from microturn.model.cpu.angles import Angles
from microturn.model.cpu.attention_operands import padded
from microturn.model.cpu.attention_panels import KEY_BLOCK
from microturn.model.cpu.attention_scores import KernelScores
from microturn.model.paged_step import PagedStep

# Most rows of a tile, and of all heads that a unit takes: with head_dim 64 queries and sums take up to 32 KiB of the L2
# cache.
TILE_ROWS = 64

# A unit takes KV heads together that have up to so many elements: their block and the next, which is prefetched, are
# 128 KiB in 8 bits, of an L2 cache of 512 KiB or more.
_ELEMENTS_TOGETHER = 512

# Keys of a split: few enough that one session occupies several threads.
SPLIT_LEN = 256

# A key costs as much to read as so many rows to compute with it.
_KEY_COST = 4

# The tiles are divided into so many units at least, as far as they have splits and heads: no thread waits long.
_UNITS_PER_THREAD = 4

_Task = tuple[int, ...]
_Unit = tuple[int, int, int, int, int, int, int, int, int]


class Work(NamedTuple):
    """The work of one step in all layers of a shape, and memory for its results.

    Attributes:
        tasks: int32 [tasks, 9]: row of the batch; its first query (packed); first of the tile's rows, counted from
            there; number of these rows; where the first query's own key is among the row's; first key; end of the keys;
            the first query as these keys see it; the position of the row's key 0. The splits of a tile are consecutive,
            in the order of their keys. For moved sinks the rotated queries follow all other queries.
        units: int32 [units, 9]: first task, end of the tasks, first KV head, number of these; then, for a part of a
            tile, the place of the first task's result, or -1 for a whole tile, the first task of the tile and the end
            of these, its number among the divided tiles, those of some heads that have several units, and how many
            units it has. Threads take units in this order, the costliest first (Graham, 1969).
        counters: int64 [1 + divided tiles], memory: of a layer's units, how many are taken; then, of each divided
            tile's, how many have ended.
        num_threads: threads that take them.
        sums: float32 [results, rows * padded_dim or more], weighted values, head by head.
        peaks: float32 [results, rows or more], highest scores.
        totals: float32 [results, rows or more], sums of weights.
        most_rows: of a unit, those of all its heads.
        window: positions visible to a query, itself included.
    """

    tasks: NDArray[np.int32]
    units: NDArray[np.int32]
    counters: NDArray[np.int64]
    num_threads: int
    sums: NDArray[np.float32]
    peaks: NDArray[np.float32]
    totals: NDArray[np.float32]
    most_rows: int
    window: int


class Tables(NamedTuple):
    """The page tables of one step, for layers of one kind (see `PagedStep`).

    Attributes:
        slots: int64 [groups, tokens].
        page_ids: int32 [groups, pages of all rows].
        page_indptr: int32 [rows + 1].
        page_size: tokens in a page.
    """

    slots: NDArray[np.int64]
    page_ids: NDArray[np.int32]
    page_indptr: NDArray[np.int32]
    page_size: int

    @classmethod
    def of(cls, steps: Sequence[PagedStep]) -> Self:
        """The tables of all groups of a kind."""
        return cls(
            np.array([step.slots for step in steps]),
            np.array([step.page_ids for step in steps]),
            steps[0].page_indptr,
            steps[0].page_size,
        )


class LayerStep(NamedTuple):
    """A step for layers of one kind, with the same scores and rotary embedding.

    Attributes:
        scores: of the layers.
        tables: where their keys and values are.
        work: what threads take.
        moved: int64 [n], the queries of rows with moved sinks.
        back: their angles, which rotate these queries back to what their sinks see.
    """

    scores: KernelScores
    tables: Tables
    work: Work
    moved: NDArray[np.int64]
    back: Angles


@dataclass(frozen=True)
class Shape:
    """What determines how rows are divided; most layers of a model have the same shape."""

    num_kv_heads: int
    group: int
    head_dim: int
    window: int


def plan(step: PagedStep, shape: Shape) -> Work:
    """Divides the rows of a step into units that threads take."""
    tiles = [(tile, _cost(tile)) for tile in _tiles(step, shape)]
    num_threads = numba.get_num_threads()
    most_cost = sum(cost for _, cost in tiles) * shape.num_kv_heads / (_UNITS_PER_THREAD * num_threads)
    tasks: list[_Task] = []
    units: list[tuple[int, _Unit]] = []
    num_divided = num_results = most_rows = most_divided = 0
    for tile, cost in tiles:
        first = len(tasks)
        tasks += tile
        num_rows = tile[0][3]
        num_together = max(1, min(TILE_ROWS // num_rows, _ELEMENTS_TOGETHER // shape.head_dim))
        num_parts = math.ceil(shape.num_kv_heads / num_together)
        wanted = math.ceil(most_cost and cost * shape.num_kv_heads / most_cost)
        num_splits = max(1, min(len(tile), math.ceil(wanted / num_parts)))
        num_parts = max(num_parts, min(shape.num_kv_heads, math.ceil(wanted / num_splits)))
        for head, end_head in _parts(shape.num_kv_heads, num_parts):
            num_heads = end_head - head
            most_rows = max(most_rows, num_heads * num_rows)
            if num_splits == 1:
                units.append((num_heads * cost, (first, len(tasks), head, num_heads, -1, first, len(tasks), -1, 1)))
                continue
            for begin, end in _parts(len(tile), num_splits):
                of_tile = num_results + begin, first, len(tasks), num_divided, num_splits
                unit = first + begin, first + end, head, num_heads, *of_tile
                units.append((num_heads * _cost(tile[begin:end]), unit))
            num_divided += 1
            num_results += len(tile)
            most_divided = max(most_divided, num_heads * num_rows)
    units.sort(key=itemgetter(0), reverse=True)
    return Work(
        np.array(tasks, np.int32),
        np.array([unit for _, unit in units], np.int32),
        np.empty(1 + num_divided, np.int64),
        min(num_threads, len(units)),
        np.empty((num_results, most_divided * padded(shape.head_dim)), np.float32),
        np.empty((num_results, most_divided), np.float32),
        np.empty((num_results, most_divided), np.float32),
        most_rows,
        shape.window,
    )


def _parts(count: int, num_parts: int) -> Iterator[tuple[int, int]]:
    """Bounds of parts that differ by one at most."""
    return pairwise(count * part // num_parts for part in range(num_parts + 1))


def _cost(tasks: Sequence[_Task]) -> int:
    """Of one head: reading a key costs as much as computing some rows."""
    return sum((task[6] - task[5]) * (_KEY_COST + task[3]) for task in tasks)


def _tiles(step: PagedStep, shape: Shape) -> Iterator[list[_Task]]:
    """The tasks of each tile."""
    bounds, of_rows = step.query_indptr.tolist(), (step.context_len, step.num_sinks, step.num_evicted)
    turned = bounds[-1]
    for row, (context_len, num_sinks, num_evicted) in enumerate(zip(*(part.tolist() for part in of_rows), strict=True)):
        start, end = bounds[row], bounds[row + 1]
        position = context_len - (end - start)
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
