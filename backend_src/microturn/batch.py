"""One forward pass's work: built whole, frozen, passed on. Knows token ids and pages; knows no sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Page ids: int32 [pages], a part of a session's own table that does not change any more, or a plain list.
Pages = NDArray[np.int32] | Sequence[int]

# Stands in a row's `token_ids` for a token that the host does not know yet; the model never looks at it.
UNKNOWN_ID = -1


@dataclass(frozen=True)
class EmbedSpan:
    """Embeddings that stand for tokens.

    Attributes:
        start: where they begin; an absolute position in a context, an offset among the new tokens in a row.
        embeds: float32 [n, hidden].
    """

    start: int
    embeds: Tensor


@dataclass(frozen=True)
class RowPages:
    """Where one kind of layers finds what a row sees: see `Row`."""

    pages: Pages
    num_sinks: int = 0
    num_evicted: int = 0


@dataclass(frozen=True)
class Row:
    """What one session has computed in this pass: its next tokens, one or many.

    Attributes:
        token_ids: the new tokens, in order; where an embedding stands for a token the id is not looked at.
        position: absolute position of the first new token; everything before it that it sees is in the pages.
        pages: the session's page ids for the model's first kind of layers, through its last new token; as many in a
            row for the same tokens as that has groups.
        embeds: embeddings that replace new tokens, by offset in `token_ids`.
        wants_logits: whether a token is sampled after the last new token.
        num_sinks: first tokens that have moved up to the others, where some behind them are not seen any more.
        num_evicted: how many these are; 0 where all tokens are in their places.
        others: the same for the model's other kinds of layers (see `LayerGroups`).
    """

    token_ids: Sequence[int]
    position: int
    pages: Pages
    embeds: Sequence[EmbedSpan] = ()
    wants_logits: bool = True
    num_sinks: int = 0
    num_evicted: int = 0
    others: Sequence[RowPages] = ()

    def seen_by(self, kind: int) -> Row:
        """The row with the pages of one kind of layers in the first one's place."""
        if kind == 0:
            return self
        found = self.others[kind - 1]
        return replace(self, pages=found.pages, num_sinks=found.num_sinks, num_evicted=found.num_evicted)

    @property
    def start(self) -> int:
        """Tokens that the first new one sees before it: where its key lies among those in the pages."""
        return self.position - self.num_evicted

    @property
    def context_len(self) -> int:
        """Tokens that the last new one sees, itself included."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Batch:
    """Rows of many sessions for one packed forward pass.

    Attributes:
        rows: one for each session.
        ids: int64 [tokens], the new tokens of all rows where the host does not know them yet, since they are being
            sampled on the device; then the rows' own, `UNKNOWN_ID`, say only how many there are.
    """

    rows: Sequence[Row]
    ids: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)
