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

# Most rows of a tile: with head_dim 64 queries and sums take up to 32 KiB of the L2 cache.
TILE_ROWS = 64

# Keys of a split: few enough that one session occupies several threads.
SPLIT_LEN = 256

# A key costs as much to read as so many rows to compute with it.
_KEY_COST = 4

# Tiles are divided into so many units at least, as far as they have splits, so that all threads have as much to do.
_UNITS_PER_THREAD = 4

_Task = tuple[int, ...]
_Unit = tuple[int, int, int, int]


class Work(NamedTuple):
    """The work of one step in all layers of a shape, and memory for its results.

    Attributes:
        tasks: int32 [tasks, 9]: row of the batch; its first query (packed); first of the tile's rows, counted from
            there; number of these rows; where the first query's own key is among the row's; first key; end of the keys;
            the first query as these keys see it; the position of the row's key 0. The splits of a tile are consecutive,
            in the order of their keys. For moved sinks the rotated queries follow all other queries.
        units: int32 [units, 4]: first task, end of the tasks, place of the first one's result, or -1 for a whole tile,
            and KV head. Threads take them in this order, the costliest first (Graham, 1969).
        num_threads: threads that take them.
        merges: int32 [divided tiles, 3]: first task, and the places of the first result and behind the last one.
        sums: float32 [kv_heads, results, rows * padded_dim or more], weighted values.
        peaks: float32 [kv_heads, results, rows or more], highest scores.
        totals: float32 [kv_heads, results, rows or more], sums of weights.
        most_rows: of a task.
        window: positions visible to a query, itself included.
    """

    tasks: NDArray[np.int32]
    units: NDArray[np.int32]
    num_threads: int
    merges: NDArray[np.int32]
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
    num_threads, heads = numba.get_num_threads(), range(shape.num_kv_heads)
    most_cost = sum(cost for _, cost in tiles) * shape.num_kv_heads / (_UNITS_PER_THREAD * num_threads)
    tasks: list[_Task] = []
    units: list[tuple[int, _Unit]] = []
    merges: list[tuple[int, int, int]] = []
    num_results = most_divided = 0
    for tile, cost in tiles:
        first = len(tasks)
        tasks += tile
        num_splits = min(len(tile), math.ceil(most_cost and cost / most_cost))
        if num_splits <= 1:
            units += [(cost, (first, len(tasks), -1, head)) for head in heads]
            continue
        for begin, end in pairwise(len(tile) * split // num_splits for split in range(num_splits + 1)):
            unit = first + begin, first + end, num_results + begin
            part_cost = _cost(tile[begin:end])
            units += [(part_cost, (*unit, head)) for head in heads]
        merges.append((first, num_results, num_results + len(tile)))
        num_results += len(tile)
        most_divided = max(most_divided, tile[0][3])
    units.sort(key=itemgetter(0), reverse=True)
    results = shape.num_kv_heads, num_results
    return Work(
        np.array(tasks, np.int32),
        np.array([unit for _, unit in units], np.int32),
        min(num_threads, len(units)),
        np.array(merges, np.int32).reshape(-1, 3),
        np.empty((*results, most_divided * padded(shape.head_dim)), np.float32),
        np.empty((*results, most_divided), np.float32),
        np.empty((*results, most_divided), np.float32),
        max(tile[0][3] for tile, _ in tiles),
        shape.window,
    )


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
