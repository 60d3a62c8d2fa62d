"""The page tables of one step, in the form that FlashInfer's planners take, shared by all layers of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from microturn.model.batch import Batch

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class PagedStep:
    """Where the keys of a batch are, for one group of layers.

    Attributes:
        query_indptr: int32 [rows + 1], bounds of the rows' queries in the packed batch.
        context_len: int32 [rows], keys of each row, its new ones included.
        page_indptr: int32 [rows + 1], bounds of the rows' pages in `page_ids`.
        page_ids: int32 [pages of all rows].
        slots: int64 [tokens], page * page_size + offset of each new token's key and value.
        num_sinks: int32 [rows], moved sinks of a row: its first keys; 0 without any.
        num_evicted: int64 [rows], evicted tokens behind the sinks: the distance by which the sinks have moved.
        page_size: tokens in a page.
    """

    query_indptr: Int32Array
    context_len: Int32Array
    page_indptr: Int32Array
    page_ids: Int32Array
    slots: NDArray[np.int64]
    num_sinks: Int32Array
    num_evicted: NDArray[np.int64]
    page_size: int

    def moved_queries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The queries of rows with moved sinks, in order: their indices, and the distances of their sinks."""
        moved_by = np.repeat(np.where(self.num_sinks, self.num_evicted, 0), np.diff(self.query_indptr))
        (at,) = moved_by.nonzero()
        return at, moved_by[at]

    def apart(self) -> tuple[Self, Self]:
        """Splits the step: the moved sinks for the queries in `moved_queries`, and all other keys of the rows."""
        has_moved, nums_pages = self.num_sinks > 0, np.diff(self.page_indptr)
        nums_sink_pages = self.num_sinks // self.page_size
        index_in_row = np.arange(len(self.page_ids)) - np.repeat(self.page_indptr[:-1], nums_pages)
        is_sink = index_in_row < np.repeat(nums_sink_pages, nums_pages)
        unmoved = np.zeros_like(self.num_sinks)
        sinks = replace(
            self,
            query_indptr=_indptr(np.diff(self.query_indptr)[has_moved]),
            context_len=self.num_sinks[has_moved],
            page_indptr=_indptr(nums_sink_pages[has_moved]),
            page_ids=self.page_ids[is_sink],
            num_sinks=unmoved[has_moved],
        )
        others = replace(
            self,
            context_len=self.context_len - self.num_sinks,
            page_indptr=_indptr(nums_pages - nums_sink_pages),
            page_ids=self.page_ids[~is_sink],
            num_sinks=unmoved,
        )
        return sinks, others

    @classmethod
    def plan(cls, batch: Batch, page_size: int, kind: int = 0, num_groups: int = 1) -> list[Self]:
        """Plans a batch for each group of a kind of layers; the plans differ in `page_ids` and `slots` only.

        Each row's pages must include its last new token.
        """
        rows = batch.rows if kind == 0 else [row.seen_by(kind) for row in batch.rows]
        num_new = np.fromiter((len(row.token_ids) for row in rows), np.int32)
        starts = np.fromiter((row.start for row in rows), np.int64)
        query_indptr = _indptr(num_new)
        page_indptr = _indptr(np.fromiter((len(row.pages) // num_groups for row in rows), np.int32))
        pages = np.concatenate([row.pages for row in rows], dtype=np.int32).reshape(-1, num_groups)
        # Index of each new token in its row, and index of its page among all pages.
        at = np.arange(query_indptr[-1]) + np.repeat(starts - query_indptr[:-1], num_new)
        written = np.repeat(page_indptr[:-1], num_new) + at // page_size
        return [
            cls(
                query_indptr=query_indptr,
                context_len=(starts + num_new).astype(np.int32),
                page_indptr=page_indptr,
                page_ids=page_ids,
                slots=page_ids[written].astype(np.int64) * page_size + at % page_size,
                num_sinks=np.fromiter((row.num_sinks if row.num_evicted else 0 for row in rows), np.int32),
                num_evicted=np.fromiter((row.num_evicted for row in rows), np.int64),
                page_size=page_size,
            )
            for page_ids in np.ascontiguousarray(pages.T)
        ]


def _indptr(lengths: NDArray[np.int32]) -> Int32Array:
    """Cumulative bounds of rows with these lengths."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
