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
        page_size: tokens in a page.
    """

    query_indptr: Int32Array
    context_len: Int32Array
    page_indptr: Int32Array
    page_ids: Int32Array
    slots: NDArray[np.int64]
    page_size: int

    @classmethod
    def plan(cls, batch: Batch, page_size: int) -> Self:
        """Lays out a batch; each row's pages must reach through its last new token."""
        rows = batch.rows
        slots = []
        for row in rows:
            positions = np.arange(row.position, row.context_len)
            pages = np.array(row.pages[row.position // page_size :], dtype=np.int64)
            slots.append(pages[positions // page_size - row.position // page_size] * page_size + positions % page_size)
        return cls(
            query_indptr=np.fromiter(accumulate((len(row.token_ids) for row in rows), initial=0), np.int32),
            context_len=np.fromiter((row.context_len for row in rows), np.int32),
            page_indptr=np.fromiter(accumulate((len(row.pages) for row in rows), initial=0), np.int32),
            page_ids=np.fromiter(chain.from_iterable(row.pages for row in rows), np.int32),
            slots=np.concatenate(slots),
            page_size=page_size,
        )
