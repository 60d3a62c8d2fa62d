"""How often each token stands in a session's context: what penalties ask for, without walking the context.

A session's counts are made when a turn with penalties comes, follow what is appended when the next choice is made, and
are cut back with the session's KV: like that they are right for the first tokens of the context, however it goes on.
What the context has forgotten stays counted, and is never cut back. What is done for a token does not depend on how
many there are.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from microturn.sessions.context import Context

# Stands for an embedding in what has been counted: no token.
_NO_ID = -1

_LEAST_ROOM = 64


class TokenCounts:
    """The counts of the first tokens of a context; at first of none."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        # What has been counted, position by position from the first that a cut can reach: to be taken back then.
        self._counted = array("i")
        self._first = 0
        self._place_of: dict[int, int] = {}
        # Ids and their counts, none of them 0, in any order; behind these, room.
        self._table: NDArray[np.int64] = np.empty((2, 0), np.int64)

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> Self:
        """The counts of some tokens."""
        counts = cls()
        counts._append(token_ids)
        return counts

    def __len__(self) -> int:
        """How many tokens of the context have been counted, embeddings included."""
        return self._first + len(self._counted)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The ids that are there, int64 [n], each once. Good until the counts change; `counts` likewise."""
        return self._table[0, : len(self._place_of)]

    @property
    def counts(self) -> NDArray[np.int64]:
        """How often each of `ids` is there, int64 [n]."""
        return self._table[1, : len(self._place_of)]

    def follow(self, context: Context) -> Self:
        """Counts what a context has behind what has been counted of it; embeddings are no tokens."""
        if len(self) < context.first_kept:
            self._begin_behind_forgotten(context)
        self._append(_read(context, len(self), len(context)))
        del self._counted[: context.first_kept - self._first]
        self._first = context.first_kept
        return self

    def cut(self, length: int) -> None:
        """Takes back all tokens from position `length` on."""
        if length >= len(self):
            return
        kept = max(0, length - self._first)
        for token_id, count in Counter(self._counted[kept:]).items():
            self._add(token_id, -count)
        del self._counted[kept:]

    def check_integrity(self, context: Context) -> None:
        """Asserts that these are the counts of the context's first tokens."""
        if len(self) < context.first_kept:
            return  # counted anew before they are asked for
        first = max(self._first, context.first_kept)
        counted = _read(context, first, len(self))
        assert self._counted[first - self._first :] == counted, "other tokens are counted than are there"
        found = dict(zip(self.ids.tolist(), self.counts.tolist(), strict=True))
        not_counted = Counter(token_id for token_id in _read(context, len(self), len(context)) if token_id != _NO_ID)
        assert found == Counter(context.known_ids()) - not_counted, "counts are wrong"

    def _begin_behind_forgotten(self, context: Context) -> None:
        """Counts anew what can be read of a context that has forgotten what is not counted here."""
        self._clear()
        for token_id in context.forgotten_counts.nonzero()[0].tolist():
            self._add(token_id, int(context.forgotten_counts[token_id]))
        for token_id in _read(context, 0, context.num_sinks):
            self._add(token_id, 1)
        self._first = context.first_kept

    def _append(self, token_ids: Iterable[int]) -> None:
        num_before = len(self._counted)
        self._counted.extend(token_ids)
        for token_id, count in Counter(self._counted[num_before:]).items():
            self._add(token_id, count)

    def _add(self, token_id: int, count: int) -> None:
        if token_id == _NO_ID:
            return
        place = self._place_of.get(token_id)
        if place is None:
            place = self._place_of[token_id] = len(self._place_of)
            if place == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.empty((2, max(_LEAST_ROOM, place)), np.int64)), axis=1)
            self._table[:, place] = token_id, 0
        self._table[1, place] += count
        if self._table[1, place] == 0:
            self._remove(token_id, place)

    def _remove(self, token_id: int, place: int) -> None:
        """The last one takes the place of one that is there no more."""
        self._table[:, place] = self._table[:, len(self._place_of) - 1]
        self._place_of[int(self._table[0, place])] = place
        del self._place_of[token_id]


def _read(context: Context, first: int, last: int) -> array[int]:
    """What stands from position `first` to before `last`: token ids, and `_NO_ID` for embeddings."""
    found = array("i", context.ids_between(first, last))
    for span in context.embeds_between(first, last):
        found[span.start : span.start + len(span.embeds)] = array("i", [_NO_ID] * len(span.embeds))
    return found
