"""A batch on its way to other processes: without its tokens, which they are given embedded, and in few objects.

Rows with an array of pages each would take ten times as long to write: 1.1 ms of 256 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from microturn.model.batch import Batch, Row, RowPages

# Number of pages, of moved sinks and of evicted tokens: see `RowPages`.
_Pages = tuple[int, int, int]
# Number of tokens, position, whether logits are wanted, number of drafts, and the pages of each kind: see `Row`.
_Row = tuple[int, int, bool, int, list[_Pages]]


@dataclass(frozen=True)
class PackedBatch:
    """The rows of a batch.

    Attributes:
        rows: plain tuples, for the pickler.
        pages: int32, of all rows and kinds behind each other.
    """

    rows: list[_Row]
    pages: NDArray[np.int32]

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Packs a batch of rows without recurrent states."""
        rows: list[_Row] = []
        pages = []
        for row in batch.rows:
            kinds: list[Row | RowPages] = [row, *row.others]
            pages += [of.pages for of in kinds]
            counts = [(len(of.pages), of.num_sinks, of.num_evicted) for of in kinds]
            rows.append((len(row.token_ids), row.position, row.wants_logits, row.num_drafts, counts))
        return cls(rows, np.concatenate(pages, dtype=np.int32))

    def unpacked(self) -> Batch:
        """The batch, with any tokens."""
        rows, end = [], 0
        for num_tokens, position, wants_logits, num_drafts, counts in self.rows:
            unpacked = []
            for num_pages, num_sinks, num_evicted in counts:
                first, end = end, end + num_pages
                unpacked.append(RowPages(self.pages[first:end], num_sinks, num_evicted))
            of, *others = unpacked
            ids = range(num_tokens)
            rows.append(
                Row(ids, position, of.pages, (), wants_logits, num_drafts, of.num_sinks, of.num_evicted, others)
            )
        return Batch(rows)
