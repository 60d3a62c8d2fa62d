"""The page tables of one step, in the form that FlashInfer's planners take, shared by all layers of a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from microturn.model.batch import Batch, Row

Int32Array = NDArray[np.int32]

_NONE = np.empty(0, np.int64)


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
        if not self.num_sinks.any():
            return _NONE, _NONE
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
        columns: Any = Row._make(zip(*rows, strict=True))
        lengths, num_evicted = batch.lengths, np.array(columns.num_evicted)
        context_len = np.array(columns.position) - num_evicted + lengths
        pages = np.concatenate(columns.pages, dtype=np.int32)
        query_indptr = _indptr(lengths)
        page_indptr = _indptr(np.array([len(of_row) // num_groups for of_row in columns.pages]))
        assert (context_len <= np.diff(page_indptr) * page_size).all(), "a row lacks the page of its last new token"
        # Of each new token: its index among the keys of its row, and that of its page among the pages of all rows.
        at = np.arange(query_indptr[-1]) + (context_len - query_indptr[1:]).repeat(lengths)
        page_at = page_indptr[:-1].repeat(lengths) + at // page_size
        offsets = at % page_size
        new = partial(
            cls,
            query_indptr=query_indptr,
            context_len=context_len.astype(np.int32),
            page_indptr=page_indptr,
            num_sinks=np.array(columns.num_sinks, np.int32) * (num_evicted > 0),
            num_evicted=num_evicted,
            page_size=page_size,
        )
        of_groups = [np.ascontiguousarray(pages[group::num_groups]) for group in range(num_groups)]
        return [
            new(page_ids=page_ids, slots=page_ids[page_at].astype(np.int64) * page_size + offsets)
            for page_ids in of_groups
        ]


def _indptr(lengths: NDArray[Any]) -> Int32Array:
    """Cumulative bounds of rows with these lengths."""
    indptr = np.zeros(len(lengths) + 1, np.int32)
    lengths.cumsum(dtype=np.int32, out=indptr[1:])
    return indptr
