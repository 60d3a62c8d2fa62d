"""Native paged attention: one call computes all rows of a step, without copying any context.

The rows of a *tile* are a session's new queries times the query heads that share a KV head, up to 48 rows: an append of
16 tokens with three heads per KV head reads each key once. A tile's keys are divided into *splits*, and every (split,
KV head) is an independent task::

    keys    0                                            newest + 1
            |  split 0   |  split 1   |  split 2   |  split 3  |     once for each KV head
                         |            |
                         +--+--+--+--+   blocks of 64 keys, found through the page table. For each of them:
                         |  |  |  |  |
                         +--+--+--+--+   scores = keys x queries           [64, rows], masked at window and diagonal
                                         peak, total, weights = softmax    [rows], [rows], [64, rows]
                                         sums = shrink * sums + weights x values    [rows, head_dim], never leave cache

    Finally the splits are merged in order: sums and totals, weighted by 2 ** (peak - highest peak).

This is an online softmax (Milakov and Gimelshein, 2018) over tiles as in FlashAttention (Dao et al., 2022), split over
keys as in Flash-Decoding (Dao et al., 2023). Tiles and splits depend on the row only, so that a row's result does not
depend on the rest of the batch; in the exact mode only on the query and the tokens that it sees. Keys and values in
bfloat16 or int8 are converted to floats a block at a time.

Threads: Numba's OpenMP layer binds to the OpenMP runtime that torch has loaded, so that both share one team. Its other
layers have their own threads, which compete with torch's spinning ones: measured twice as slow on two cores.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.kv.tensors import LayerPages
from microturn.model.cpu.attention_kernels import KEY_BLOCK, TILE_ROWS, append_and_attend
from microturn.model.paged_step import Int32Array, PagedStep

# Keys of a split: few enough that one session occupies several threads, and enough that copying its queries takes a
# task less than a tenth of its time. A row of many tiles has enough tasks without more splits.
SPLIT_LEN = 256
MAX_ROW_TASKS = 64

_UNBOUNDED = 2**30


def unavailable_reason() -> str | None:
    """Why this kernel cannot run here, or None when it can."""
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        return f"Numba's OpenMP layer does not load ({error}); install libgomp1 for faster attention"
    return None


@dataclass(frozen=True)
class _Shape:
    """What determines how rows are divided; most layers of a model have the same shape."""

    num_kv_heads: int
    group: int
    head_dim: int
    window: int


@dataclass(frozen=True)
class _Tasks:
    """The tasks of one step in all layers of a shape, and memory for their results.

    Attributes:
        tasks: int32 [tasks, 9]: row of the batch; its first query (packed); first of the tile's rows, counted from
            there; number of these rows; where the first query's own key is among the row's; first key; end of the keys;
            the first query as these keys see it; the offset that makes a key's index a multiple of KEY_BLOCK at the
            beginning of a block. The splits of a tile are consecutive, in the order of their keys. For moved sinks the
            rotated queries follow all other queries.
        tile_indptr: int32 [tiles + 1], bounds of the tiles' splits in `tasks`.
        sums: float32 [kv_heads, tasks, head_dim * TILE_ROWS], weighted values.
        peaks: float32 [kv_heads, tasks, TILE_ROWS], highest scores.
        totals: float32 [kv_heads, tasks, TILE_ROWS], sums of weights.
    """

    tasks: Int32Array
    tile_indptr: Int32Array
    sums: NDArray[np.float32]
    peaks: NDArray[np.float32]
    totals: NDArray[np.float32]

    @classmethod
    def plan(cls, step: PagedStep, shape: _Shape, *, exact: bool) -> Self:
        tasks: list[tuple[int, ...]] = []
        tile_indptr = [0]
        turned = int(step.query_indptr[-1])
        for row in range(len(step.context_len)):
            start, end = int(step.query_indptr[row]), int(step.query_indptr[row + 1])
            position = int(step.context_len[row]) - (end - start)
            num_sinks, num_evicted = int(step.num_sinks[row]), int(step.num_evicted[row])
            num_rows = (end - start) * shape.group
            max_splits = math.ceil(MAX_ROW_TASKS / math.ceil(num_rows / TILE_ROWS))
            for first in range(0, num_rows, TILE_ROWS):
                num = min(TILE_ROWS, num_rows - first)
                oldest = max(0, position + first // shape.group - shape.window + 1)
                key_end = position + (first + num - 1) // shape.group + 1
                tile = row, start, first, num, position
                if oldest < num_sinks:
                    tasks.append((*tile, 0 if exact else oldest, num_sinks, turned, 0))
                    oldest = num_sinks
                if exact:
                    borders = _fixed_borders(oldest, key_end, num_sinks, num_evicted)
                else:
                    num_splits = min(max_splits, math.ceil((key_end - oldest) / SPLIT_LEN))
                    borders = [oldest + (key_end - oldest) * split // num_splits for split in range(num_splits + 1)]
                for first_key, last_key in pairwise(borders):
                    phase = num_evicted if exact else -first_key
                    tasks.append((*tile, first_key, last_key, start, phase % KEY_BLOCK))
                tile_indptr.append(len(tasks))
            turned += end - start if num_sinks else 0
        results = (shape.num_kv_heads, len(tasks))
        return cls(
            np.array(tasks, np.int32).reshape(-1, 9),
            np.array(tile_indptr, np.int32),
            np.empty((*results, shape.head_dim * TILE_ROWS), np.float32),
            np.empty((*results, TILE_ROWS), np.float32),
            np.empty((*results, TILE_ROWS), np.float32),
        )


def _fixed_borders(oldest: int, key_end: int, num_sinks: int, num_evicted: int) -> list[int]:
    """Bounds of splits independent of the tile: at multiples of SPLIT_LEN of the keys' positions.

    Keys of a tile that one of its queries does not see have a weight of exactly 0.
    """
    first = oldest - (oldest + num_evicted) % SPLIT_LEN
    return [max(num_sinks, first), *range(first + SPLIT_LEN, key_end, SPLIT_LEN), key_end]


class NativePlan:
    """The work of one step for one kind of layers, planned at the first layer of each shape.

    Args:
        steps: the page tables of the batch, for each group of the layers.
        exact: whether a query's result is bitwise the same in any batch.
    """

    def __init__(self, steps: Sequence[PagedStep], *, exact: bool = False) -> None:
        self._steps = steps
        self._exact = exact
        self._tasks: dict[_Shape, _Tasks] = {}

    def append_and_attend(
        self, group: int, q: Tensor, k: Tensor, v: Tensor, kv: LayerPages, scale: float, window: int | None, out: Tensor
    ) -> None:
        """Writes the new keys and values of a layer, then computes the attention of all rows.

        Shapes: q [tokens and rotated ones, heads, head_dim]; out [tokens, heads, head_dim]; k and v [tokens, kv_heads,
        head_dim].
        """
        num_kv_heads, head_dim = k.shape[1:]
        shape = _Shape(num_kv_heads, q.shape[1] // num_kv_heads, head_dim, _UNBOUNDED if window is None else window)
        work = self._tasks.get(shape)
        if work is None:
            work = self._tasks[shape] = _Tasks.plan(self._steps[0], shape, exact=self._exact)
        step = self._steps[group]
        append_and_attend(
            q.numpy(),
            k.numpy(),
            v.numpy(),
            _array(kv.elements),
            kv.scales.numpy(),
            step.slots,
            step.page_ids,
            step.page_indptr,
            work.tasks,
            work.tile_indptr,
            np.float32(scale * math.log2(math.e)),
            shape.window,
            self._exact,
            out.numpy(),
            work.sums,
            work.peaks,
            work.totals,
        )


def _array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's memory as an array; bfloat16, which NumPy lacks, as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of this kernel for the calling thread, and selects the OpenMP layer that torch uses."""
    numba.config.THREADING_LAYER = "omp"
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
