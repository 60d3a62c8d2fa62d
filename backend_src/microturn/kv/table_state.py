"""What a page table says without its pages: as plain numbers, which files and other servers get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

from microturn.kv.page_track import Track
from microturn.kv.state_track import StateTrack


@dataclass(frozen=True)
class TableState:
    """A page table without its pages, as plain numbers; with their content the table can be restored.

    Attributes:
        page_size: tokens in a page.
        kv_len: position of the first token that is not in the cache.
        tracks: which of the tokens before it each kind of layers keeps; last, which states recurrent layers keep.
    """

    page_size: int
    kv_len: int
    tracks: tuple[Track | StateTrack, ...] = (Track(),)

    @property
    def num_pages(self) -> int:
        """Pages with tokens in the cache."""
        return sum(self.ends)

    def whole(self) -> Self:
        """The state of as many tokens as have pages that are not written again."""
        return self.cut(min(track.full_len(self.kv_len, self.page_size) for track in self.tracks))

    @property
    def num_rewritten(self) -> int:
        """Pages, the last of them, whose content the next step replaces: those of the newest recurrent state."""
        track = self.tracks[-1]
        return track.num_groups if isinstance(track, StateTrack) and self.kv_len % track.block else 0

    @property
    def ends(self) -> list[int]:
        """Number of pages with tokens in the cache, for each kind of layers."""
        return [track.num_pages(self.kv_len, self.page_size) for track in self.tracks]

    def num_pages_with(self, num_tokens: int) -> int:
        """Pages for the cached tokens and `num_tokens` more."""
        return sum(track.num_pages(self.kv_len + num_tokens, self.page_size) for track in self.tracks)

    def cut(self, kv_len: int) -> Self:
        """The state after every token from position `kv_len` on is dropped; it uses the first of these pages.

        If some layers no longer keep all that the next token would see, more is dropped: up to where recurrent layers
        have a state, up to the sinks, or everything.
        """
        if kv_len >= self.kv_len:
            return self
        states = chain.from_iterable(track.positions(kv_len) for track in self.tracks)
        candidates = kv_len, *states, min(kv_len, max(track.num_sinks for track in self.tracks)), 0
        left = next(left for left in candidates if all(track.reaches(left) for track in self.tracks))
        return replace(self, kv_len=left, tracks=tuple(track.cut(left) for track in self.tracks))
