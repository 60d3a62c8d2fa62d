"""The page tables of one step, in the form that FlashInfer's planners take, shared by all layers and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Self

import numpy as np
from numpy.typing import NDArray

from microturn.batch import Batch

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class PagedStep:
    """Where the rows of a batch find their keys.

    Attributes:
        query_indptr: int32 [rows + 1], rows' queries in the packed batch.
        context_len: int32 [rows], keys of each row, its new ones included.
        page_indptr: int32 [rows + 1], rows' pages in `page_ids`.
        page_ids: int32 [pages of all rows].
        slots: int64 [tokens], page * page_size + offset at which each new token's key and value go.
        num_sinks: int32 [rows], first keys of a row that have moved up to the others; 0 where none have.
        moved_by: int64 [rows], how far they have moved.
        page_size: tokens in a page.
    """

    query_indptr: Int32Array
    context_len: Int32Array
    page_indptr: Int32Array
    page_ids: Int32Array
    slots: NDArray[np.int64]
    num_sinks: Int32Array
    moved_by: NDArray[np.int64]
    page_size: int

    def moved_queries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The queries of rows whose sinks have moved, in their order: where they are, and how far their sinks moved."""
        moved_by = np.repeat(self.moved_by, np.diff(self.query_indptr))
        (at,) = moved_by.nonzero()
        return at, moved_by[at]

    @classmethod
    def plan(cls, batch: Batch, page_size: int) -> Self:
        """Lays out a batch; each row's pages must reach through its last new token."""
        rows = batch.rows
        slots = []
        for row in rows:
            at = np.arange(row.start, row.context_len)
            pages = np.array(row.pages[row.start // page_size :], dtype=np.int64)
            slots.append(pages[at // page_size - row.start // page_size] * page_size + at % page_size)
        return cls(
            query_indptr=np.fromiter(accumulate((len(row.token_ids) for row in rows), initial=0), np.int32),
            context_len=np.fromiter((row.context_len for row in rows), np.int32),
            page_indptr=np.fromiter(accumulate((len(row.pages) for row in rows), initial=0), np.int32),
            page_ids=np.fromiter(chain.from_iterable(row.pages for row in rows), np.int32),
            slots=np.concatenate(slots),
            num_sinks=np.fromiter((row.num_sinks if row.num_evicted else 0 for row in rows), np.int32),
            moved_by=np.fromiter((row.num_evicted if row.num_sinks else 0 for row in rows), np.int64),
            page_size=page_size,
        )
