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

Finally the splits are merged in order: sums and totals, weighted by 2 ** (peak - highest peak). A head's sink logit is
added to the total of what has been merged.

This is an online softmax (Milakov and Gimelshein, 2018) over tiles as in FlashAttention (Dao et al., 2022), split over
keys as in Flash-Decoding (Dao et al., 2023). Splits and blocks lie at fixed positions, and each row adds up its own
sums, key by key: so **a query's result depends to the bit only on the tokens that it sees**, and not on how a session
is divided into steps, what else is in the batch, or how the work is divided among threads. (Batch invariance, as in He
et al., "Defeating Nondeterminism in LLM Inference", 2025.)

Threads take *units*: a whole tile of some KV heads, whose splits are merged at once, or some splits of a tile that
would keep a thread busy for longer than the others; their results are kept until all are there. A unit's heads, which
lie one behind another in a page, are attended block by block: so a thread reads memory in long pieces.

Threads: Numba's OpenMP layer binds to the OpenMP runtime that torch has loaded, so that both share one team. Its other
layers have their own threads, which compete with torch's spinning ones: measured twice as slow on two cores.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numba
from torch import Tensor

from microturn.kv.layer_groups import LayerShape
from microturn.kv.layer_pages import LayerPages
from microturn.kv.page_layout import PANEL_ELEMENTS, PANEL_TOKENS
from microturn.model.cpu.attention_kernels import append_and_attend
from microturn.model.cpu.attention_scores import KernelScores
from microturn.model.cpu.attention_work import Shape, Tables, Work, plan
from microturn.model.paged_step import PagedStep
from microturn.model.scores import Scores

_UNBOUNDED = 2**30


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


class NativePlan:
    """The work of one step for one kind of layers, planned at the first layer of each shape.

    Args:
        steps: the page tables of the batch, for each group of the layers.
    """

    def __init__(self, steps: Sequence[PagedStep]) -> None:
        self._step = steps[0]
        self._work: dict[Shape, Work] = {}
        self.tables = Tables.of(steps)

    def work(self, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None) -> Work:
        """The work of layers with these heads and window."""
        shape = Shape(num_kv_heads, num_heads // num_kv_heads, head_dim, _UNBOUNDED if window is None else window)
        if shape not in self._work:
            self._work[shape] = plan(self._step, shape)
        return self._work[shape]

    def append_and_attend(
        self, group: int, q: Tensor, k: Tensor, v: Tensor, kv: LayerPages, scores: Scores, out: Tensor
    ) -> None:
        """Writes the new keys and values of a layer, then computes the attention of all rows.

        Shapes: q [tokens and rotated ones, heads, head_dim]; out [tokens, heads, head_dim]; k and v [tokens, kv_heads,
        head_dim].
        """
        work = self.work(q.shape[1], k.shape[1], k.shape[2], scores.window)
        arrays = (part.numpy() for part in (q, k, v, out))
        append_and_attend(*arrays, *kv.arrays, KernelScores.of(scores), self.tables, group, work)


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of this kernel for the calling thread, and selects the OpenMP layer that torch uses."""
    numba.config.THREADING_LAYER = "omp"
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
