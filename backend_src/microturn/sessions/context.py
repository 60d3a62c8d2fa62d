"""What a session has been told and has said: token ids, and embeddings where they stood for tokens.

    position   0         sinks                              first_kept                len
               | kept    | forgotten: counted, but gone     | kept                    |

Whatever is kept can be computed again, so a session's KV may be dropped at any time. A session whose window slides may
forget what stands behind its sinks; positions go on counting, and asking for one that is forgotten is an error.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from microturn.model.batch import EmbedSpan

# Stands where an embedding was given; the model never looks at it.
EMBED_ID = 0

_START = attrgetter("start")


class Context:
    """The append-only history of a session, which a failed turn may cut back.

    Attributes:
        embeds: those that are kept, each at its absolute position.
        num_sinks: first tokens, which are kept; where nothing is forgotten, it does not matter.
        num_forgotten: tokens behind them that are gone.
        forgotten_counts: how often each id, by its number, is among these.
    """

    def __init__(self) -> None:
        self.embeds: list[EmbedSpan] = []
        self.num_sinks = 0
        self.num_forgotten = 0
        self.forgotten_counts: NDArray[np.int32] = np.zeros(0, np.int32)
        self._ids = array("i")  # of what is kept, without a gap
        self._embed_bytes = 0

    def __len__(self) -> int:
        return self.num_forgotten + len(self._ids)

    @property
    def first_kept(self) -> int:
        """The position from which on all is kept; before it, the sinks are."""
        return self.num_sinks + self.num_forgotten if self.num_forgotten else 0

    @property
    def num_bytes(self) -> int:
        """What all that is kept takes."""
        return self._embed_bytes + self._ids.itemsize * len(self._ids) + self.forgotten_counts.nbytes

    @property
    def token_ids(self) -> list[int]:
        """All token ids; nothing may be forgotten."""
        return self.ids_between(0, len(self))

    @property
    def last_token_id(self) -> int | None:
        """The last token, or None when the context is empty or ends with an embedding."""
        if not self._ids or (self.embeds and _end(self.embeds[-1]) == len(self)):
            return None
        return self._ids[-1]

    # ---- it grows and is cut back --------------------------------------------------------------------------------

    def append_id(self, token_id: int) -> None:
        self._ids.append(token_id)

    def append_ids(self, token_ids: Sequence[int]) -> None:
        self._ids.extend(token_ids)

    def append_embeds(self, embeds: Tensor) -> None:
        """Appends embeddings, float32 [n, hidden]."""
        if len(embeds):
            self._keep([EmbedSpan(len(self), embeds)])
            self._ids.extend([EMBED_ID] * len(embeds))

    def place_embeds(self, starts: Sequence[int], pieces: Sequence[Tensor]) -> None:
        """Puts embeddings, float32 [n, hidden], where they stand for tokens that are here already.

        Args:
            starts: where each piece begins, in their order.
            pieces: the embeddings.
        """
        assert not self.embeds, "embeddings are here already"
        self._keep([EmbedSpan(start, embeds) for start, embeds in zip(starts, pieces, strict=True)])
        edges = [edge for span in self.embeds for edge in (span.start, _end(span))]
        assert edges == sorted(edges), "embeddings overlap"
        assert not edges or edges[-1] <= len(self), "embeddings beyond the context"
        assert not any(self._is_forgotten(span.start, _end(span)) for span in self.embeds), "embeddings in a gap"

    def truncate(self, length: int) -> None:
        """Gives up everything from position `length` on."""
        self.split(length)

    def split(self, length: int) -> Context:
        """Gives up everything from position `length` on, and returns it."""
        tail = Context()
        if length < len(self):
            assert length >= self.first_kept, f"a cut at {length}, and all is kept from {self.first_kept} on"
            at = self._at(length)
            tail._ids = self._ids[at:]
            del self._ids[at:]
            tail._keep(self._cut_embeds(length))
        return tail

    def extend(self, tail: Context) -> Self:
        """Appends all of another context, of which nothing is forgotten."""
        assert not tail.num_forgotten, "a tail with a gap"
        self._keep([EmbedSpan(len(self) + span.start, span.embeds) for span in tail.embeds])
        self._ids.extend(tail._ids)
        return self

    def copy(self) -> Context:
        """An independent context of the same tokens."""
        copy = Context()
        copy.num_sinks, copy.num_forgotten = self.num_sinks, self.num_forgotten
        copy.forgotten_counts = self.forgotten_counts  # never changed in place
        copy._ids = self._ids[:]
        copy._keep(self.embeds)
        return copy

    # ---- it forgets ----------------------------------------------------------------------------------------------

    def forget(self, num_sinks: int, first_kept: int) -> None:
        """Forgets what stands between the sinks and a position, for ever; ids are still counted.

        Args:
            num_sinks: first tokens, which stay; always as many.
            first_kept: the position from which on everything stays too.
        """
        first = self.first_kept or num_sinks
        assert self.num_sinks == num_sinks or not self.num_forgotten, "other sinks than before"
        assert num_sinks <= first <= first_kept <= len(self), "what is forgotten comes back, or never was"
        self._count(self._known_ids(first, first_kept))
        self._forget_embeds(first, first_kept)
        del self._ids[num_sinks : num_sinks + first_kept - first]
        self.num_sinks, self.num_forgotten = num_sinks, first_kept - num_sinks

    def recall_gap(self, num_sinks: int, num_forgotten: int, counts: NDArray[np.int32]) -> None:
        """Makes an empty context one that has forgotten what another had, by what that said of itself.

        The ids of what it kept are appended next.
        """
        assert not len(self), "only an empty context begins with a gap"
        assert num_sinks >= 0 <= num_forgotten, "a gap of less than nothing"
        self.num_sinks, self.num_forgotten, self.forgotten_counts = num_sinks, num_forgotten, counts

    # ---- what stands in it ---------------------------------------------------------------------------------------

    def ids_between(self, first: int, last: int) -> list[int]:
        """Token ids at positions from `first` to before `last`, as far as there are any; none may be forgotten."""
        if not self.num_forgotten:
            return self._ids[first:last].tolist()
        last = min(last, len(self))
        if first >= last:
            return []
        assert not self._is_forgotten(first, last), f"some of {first} to {last} is forgotten, up to {self.first_kept}"
        return self._ids[self._at(first) : self._at(last)].tolist()

    def kept_ids(self) -> Sequence[int]:
        """Token ids of all that is kept: the sinks', then the others'."""
        return self._ids

    def embeds_between(self, first: int, last: int) -> list[EmbedSpan]:
        """Embeddings at positions from `first` to before `last`, their starts counted from `first`."""
        assert not self._is_forgotten(first, last), f"some of {first} to {last} is forgotten, up to {self.first_kept}"
        if not self.embeds:
            return []
        spans = []
        # An hour of speech is tens of thousands of spans: only those that may overlap are looked at.
        from_at, to_at = bisect_right(self.embeds, first, key=_START) - 1, bisect_left(self.embeds, last, key=_START)
        for span in self.embeds[max(0, from_at) : to_at]:
            begin, end = max(first, span.start), min(last, _end(span))
            if begin < end:
                spans.append(EmbedSpan(begin - first, span.embeds[begin - span.start : end - span.start]))
        return spans

    def num_kept_between(self, first: int, last: int) -> int:
        """How many positions from `first` to before `last` are not forgotten."""
        if not self.num_forgotten:
            return max(0, last - first)
        num_gone = min(last, self.first_kept) - max(first, self.num_sinks)
        return max(0, last - first - max(0, num_gone))

    def bytes_between(self, first: int, last: int) -> int:
        """What is kept between two positions takes, none of which may be forgotten."""
        num_embed_bytes = sum(span.embeds.nbytes for span in self.embeds_between(first, last))
        return num_embed_bytes + self._ids.itemsize * max(0, last - first)

    def known_ids(self) -> list[int]:
        """The token ids of the context, without the places of embeddings; those that are forgotten first, by number."""
        kept = self._ids.tolist() if not self.embeds else self._known_ids(0, len(self))
        if not self.forgotten_counts.any():
            return kept
        return [*np.repeat(np.arange(len(self.forgotten_counts)), self.forgotten_counts).tolist(), *kept]

    # ---- the parts -----------------------------------------------------------------------------------------------

    def _is_forgotten(self, first: int, last: int) -> bool:
        """Whether any of some positions is."""
        return self.num_forgotten > 0 and max(first, self.num_sinks) < min(last, self.first_kept)

    def _at(self, position: int) -> int:
        """Where the id of a position that is kept stands."""
        if position < self.first_kept:
            assert position <= self.num_sinks, (
                f"position {position} is forgotten: from {self.first_kept} on all is kept"
            )
            return position
        return position - self.num_forgotten

    def _keep(self, spans: Sequence[EmbedSpan]) -> None:
        self.embeds += spans
        self._embed_bytes += sum(span.embeds.nbytes for span in spans)

    def _drop(self, at: slice) -> list[EmbedSpan]:
        dropped = self.embeds[at]
        del self.embeds[at]
        self._embed_bytes -= sum(span.embeds.nbytes for span in dropped)
        return dropped

    def _cut_embeds(self, length: int) -> list[EmbedSpan]:
        """Takes the embeddings from a position on away; they are returned, their starts counted from there."""
        cut: list[EmbedSpan] = []
        while self.embeds and _end(self.embeds[-1]) > length:
            (span,) = self._drop(slice(len(self.embeds) - 1, None))
            num_left = max(0, length - span.start)
            cut.append(EmbedSpan(max(0, span.start - length), span.embeds[num_left:]))
            if num_left:
                self._keep([EmbedSpan(span.start, span.embeds[:num_left])])
        return cut[::-1]

    def _forget_embeds(self, first: int, last: int) -> None:
        """Gives up embeddings between two positions. What is left of one that is cut in two lets go of the rest."""
        from_at = max(0, bisect_right(self.embeds, first, key=_START) - 1)
        to_at = bisect_left(self.embeds, last, key=_START)
        left = []
        for span in self._drop(slice(from_at, to_at)):
            end = _end(span)
            if span.start < first:
                left.append(EmbedSpan(span.start, span.embeds[: min(end, first) - span.start].clone()))
            if end > last:
                left.append(EmbedSpan(last, span.embeds[last - span.start :].clone()))
        self.embeds[from_at:from_at] = left
        self._embed_bytes += sum(span.embeds.nbytes for span in left)

    def _known_ids(self, first: int, last: int) -> list[int]:
        """Ids that are kept between two positions, without the places of embeddings."""
        known: list[int] = []
        for span in self.embeds:
            if span.start < last and _end(span) > first:
                known += self._kept_between(first, span.start)
                first = max(first, _end(span))
        return known + self._kept_between(first, last)

    def _kept_between(self, first: int, last: int) -> list[int]:
        if first >= last:
            return []
        if self._is_forgotten(first, last):
            return [
                *self._kept_between(first, self.num_sinks),
                *self._kept_between(max(first, self.first_kept), last),
            ]
        return self.ids_between(first, last)

    def _count(self, token_ids: Sequence[int]) -> None:
        if token_ids:
            counts = np.bincount(token_ids, minlength=len(self.forgotten_counts)).astype(np.int32)
            counts[: len(self.forgotten_counts)] += self.forgotten_counts
            self.forgotten_counts = counts


def _end(span: EmbedSpan) -> int:
    return span.start + len(span.embeds)
