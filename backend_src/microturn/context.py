"""Everything a session has been told and has said: token ids, and embeddings where they stood for tokens.

Whatever is here can be computed again, so a session's KV may be dropped at any time. Knows no pages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Self

from torch import Tensor

from microturn.batch import EmbedSpan

# Stands in `token_ids` where an embedding was given; the model never looks at it.
EMBED_ID = 0


class Context:
    """The append-only history of a session, which a failed turn may cut back."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.embeds: list[EmbedSpan] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def last_token_id(self) -> int | None:
        """The last token, or None when the context is empty or ends with an embedding."""
        if not self.token_ids or (self.embeds and self._end(self.embeds[-1]) == len(self)):
            return None
        return self.token_ids[-1]

    def append_ids(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)

    def append_embeds(self, embeds: Tensor) -> None:
        """Appends embeddings, float32 [n, hidden]."""
        if len(embeds):
            self.embeds.append(EmbedSpan(len(self), embeds))
            self.token_ids.extend([EMBED_ID] * len(embeds))

    def place_embeds(self, starts: Sequence[int], pieces: Sequence[Tensor]) -> None:
        """Puts embeddings, float32 [n, hidden], where they stand for tokens that are here already.

        Args:
            starts: where each piece begins, in their order.
            pieces: the embeddings.
        """
        self.embeds = [EmbedSpan(start, embeds) for start, embeds in zip(starts, pieces, strict=True)]
        edges = [edge for span in self.embeds for edge in (span.start, self._end(span))]
        assert edges == sorted(edges), "embeddings overlap"
        assert not edges or edges[-1] <= len(self), "embeddings beyond the context"

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on."""
        del self.token_ids[length:]
        self.embeds = self.embeds_between(0, length)

    def copy(self) -> Context:
        """An independent context of the same tokens."""
        return Context().extend(self)

    def split(self, length: int) -> Context:
        """Forgets everything from position `length` on, and returns it."""
        tail = Context()
        tail.token_ids = self.token_ids[length:]
        tail.embeds = self.embeds_between(length, len(self))
        self.truncate(length)
        return tail

    def extend(self, tail: Context) -> Self:
        """Appends all of another context."""
        self.embeds += [EmbedSpan(len(self) + span.start, span.embeds) for span in tail.embeds]
        self.token_ids += tail.token_ids
        return self

    def embeds_between(self, first: int, last: int) -> list[EmbedSpan]:
        """Embeddings at positions from `first` to before `last`, their starts counted from `first`."""
        spans = []
        # An hour of speech is tens of thousands of spans: only those that may overlap are looked at.
        start = attrgetter("start")
        from_at, to_at = bisect_right(self.embeds, first, key=start) - 1, bisect_left(self.embeds, last, key=start)
        for span in self.embeds[max(0, from_at) : to_at]:
            begin, end = max(first, span.start), min(last, self._end(span))
            if begin < end:
                spans.append(EmbedSpan(begin - first, span.embeds[begin - span.start : end - span.start]))
        return spans

    def known_ids(self) -> list[int]:
        """The token ids of the context, without the places of embeddings."""
        if not self.embeds:
            return self.token_ids
        embedded = {at for span in self.embeds for at in range(span.start, self._end(span))}
        return [token_id for at, token_id in enumerate(self.token_ids) if at not in embedded]

    @staticmethod
    def _end(span: EmbedSpan) -> int:
        return span.start + len(span.embeds)
