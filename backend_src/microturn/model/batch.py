"""The input of one forward pass: an immutable batch of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Page ids: int32 [pages], an immutable view of a session's page list, or a plain list.
Pages = NDArray[np.int32] | Sequence[int]

# A row's `token_ids` where that is a token which the host does not know yet: this very object, whose content the model
# never reads.
UNKNOWN_IDS = (-1,)


@dataclass(frozen=True)
class EmbedSpan:
    """Embeddings in place of tokens.

    Attributes:
        start: where they begin: an absolute position in a context, or an offset in a row's new tokens.
        embeds: float32 [n, hidden].
    """

    start: int
    embeds: Tensor


class RowPages(NamedTuple):
    """The visible pages of a row for one kind of layers; see `Row`."""

    pages: Pages
    num_sinks: int = 0
    num_evicted: int = 0


# A tuple, since a step makes one for each session: a frozen dataclass takes four times as long to make.
class Row(NamedTuple):
    """The new tokens of one session in this pass.

    Attributes:
        token_ids: the new tokens, in order; ids at embeddings are ignored.
        position: absolute position of the first new token; all visible tokens before it are in the pages.
        pages: the session's page ids for the model's first kind of layers, up to its last new token; n consecutive
            pages for the same tokens if the kind has n groups.
        embeds: embeddings that replace new tokens, by offset in `token_ids`.
        wants_logits: whether a token is sampled after the last new token.
        num_drafts: last new tokens that are a draft: with `wants_logits`, a token is sampled after each of them and
            after the one before them.
        num_sinks: attention sinks, which have moved up to the visible tokens; 0 without evicted tokens.
        num_evicted: evicted tokens behind the sinks, of whole pages.
        others: the same for the model's other kinds of layers (see `LayerGroups`).
        states: int32 [states, pages of a state], of recurrent layers: that before the first new token, unless there is
            none before it, then one for each block that the new tokens begin, or more (see `StateTrack`); None without
            such layers.
    """

    token_ids: Sequence[int]
    position: int
    pages: Pages
    embeds: Sequence[EmbedSpan] = ()
    wants_logits: bool = True
    num_drafts: int = 0
    num_sinks: int = 0
    num_evicted: int = 0
    others: Sequence[RowPages] = ()
    states: NDArray[np.int32] | None = None

    def seen_by(self, kind: int) -> Row:
        """The row with the pages of another kind of layers."""
        if kind == 0:
            return self
        found = self.others[kind - 1]
        return self._replace(pages=found.pages, num_sinks=found.num_sinks, num_evicted=found.num_evicted)

    @property
    def num_logits(self) -> int:
        """Number of its new tokens, the last ones, after which a token is sampled."""
        return 1 + self.num_drafts if self.wants_logits else 0

    @property
    def start(self) -> int:
        """Number of tokens that the first new token sees before it: the index of its key in the pages."""
        return self.position - self.num_evicted

    @property
    def context_len(self) -> int:
        """Number of tokens that the last new token sees, itself included."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Batch:
    """Rows of many sessions for one packed forward pass.

    Attributes:
        rows: one for each session.
        ids: int64 [n], the first n new tokens if they are still being sampled on the device; their rows have
            `UNKNOWN_IDS` in their place.
    """

    rows: Sequence[Row]
    ids: Tensor | None = None

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Number of each row's new tokens, int64 [rows]."""
        return np.array([len(row.token_ids) for row in self.rows], np.int64)

    @cached_property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())
