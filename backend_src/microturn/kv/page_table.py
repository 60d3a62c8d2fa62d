"""The page table of a session: which pages it has, and for which of its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Self

import numpy as np

from microturn.kv.page_list import PageIds, PageList
from microturn.kv.page_track import Track
from microturn.kv.pool import PagePool
from microturn.kv.state_track import StateTrack
from microturn.kv.table_state import TableState


class PageTable:
    """The pages of one session: a list for each kind of layers, in the order of the positions.

        full          | 7       | 2       | 9       |
        window of 3   | gone    | 4       | 1       |
        tokens        | ■ ■ ■ ■ | ■ ■ ■ ■ | ■ ■ □ □ |     ■ in the cache (up to kv_len)   □ allocated only

    Pages of tokens that a kind no longer keeps (see `Track`) are removed from its list. A kind of n groups has n
    consecutive pages for the same tokens.

    Attributes:
        slides: whether some layers have sliding-window attention.
        has_states: whether some layers are recurrent.

    Args:
        pool: allocates and takes back the pages.
        tracks: the empty track of each kind of layers, that of recurrent layers last.
    """

    def __init__(self, pool: PagePool, tracks: Iterable[Track | StateTrack] = (Track(),)) -> None:
        self._pool = pool
        self.page_size = pool.page_size
        self.tracks = list(tracks)
        assert not any(track.num_sinks % self.page_size for track in self.tracks), "sinks are whole pages"
        self.slides = any(track.window is not None for track in self.tracks)
        self.has_states = isinstance(self.tracks[-1], StateTrack)
        self._pages = [PageList() for _ in self.tracks]
        self.kv_len = 0
        # Of so many first tokens those that are kept surely have their pages: most reservations ask for no more.
        self._num_reserved = 0

    @property
    def pages(self) -> list[int]:
        """All page ids, one kind of layers after the other, as a new list."""
        return list(chain.from_iterable(ids.tolist() for ids in self.page_ids))

    @property
    def page_ids(self) -> list[PageIds]:
        """The page ids of each kind of layers, without copying."""
        return [pages.ids for pages in self._pages]

    @property
    def num_pages(self) -> int:
        """Number of pages of all kinds."""
        return sum(map(len, self._pages))

    @property
    def is_empty(self) -> bool:
        """Whether the table has no pages."""
        return not any(self._pages)

    @property
    def used_pages(self) -> list[int]:
        """The pages with tokens in the cache, of all kinds, in the order of the tokens."""
        return self.used_between(0, self.save().num_pages)

    def used_between(self, first: int, last: int) -> list[int]:
        """The used pages from index `first` to before `last`."""
        used = [pages.ids[:end] for pages, end in zip(self._pages, self.save().ends, strict=True)]
        if len(used) == 1:
            return list(used[0][first:last].tolist())
        numbers = np.concatenate([track.page_numbers(self.kv_len, self.page_size) for track in self.tracks])
        return list(np.concatenate(used)[numbers.argsort(kind="stable")[first:last]].tolist())

    def full_pages(self, kind: int) -> dict[int, list[int]]:
        """The full pages of a kind of layers, one per group, by the index of the page in the session."""
        track = self.tracks[kind]
        numbers = track.page_numbers(track.full_len(self.kv_len, self.page_size), self.page_size)
        found: dict[int, list[int]] = {}
        for number, page in zip(numbers.tolist(), self._pages[kind].ids.tolist(), strict=False):
            found.setdefault(number, []).append(page)
        return found

    def seen(self, num_evicted: int) -> list[tuple[Track, PageIds]]:
        """The visible track and pages of each kind of attention layers for a row with `num_evicted` evicted tokens.

        `num_evicted` is at least the number that was evicted from the table. Tokens before the table's origin (see
        `begin_behind`) are hidden too. The page ids are copied only if some kept pages are hidden, and never change.
        """
        first = self.tracks[0]
        if len(self.tracks) == 1 and isinstance(first, Track) and not num_evicted and not first.num_evicted:
            return [(first, self._pages[0].ids)]  # of most models and sessions
        found = []
        for track, pages in self._kinds():
            if isinstance(track, StateTrack):
                continue
            if track.window is None and (num_evicted or track.num_evicted):
                num_unseen = max(num_evicted, track.num_hidden)
                if track.num_evicted != num_unseen:
                    hidden = track.hidden_pages(num_unseen, self.page_size)
                    found.append((replace(track, num_evicted=num_unseen), pages.without(hidden)))
                    continue
            found.append((track, pages.ids))
        return found

    @property
    def state_pages(self) -> PageIds:
        """The pages of the newest state of recurrent layers, if there is one, and of those to come.

        int32 [states, pages of a state].
        """
        track = self.tracks[-1]
        assert isinstance(track, StateTrack), "pages of states, and no recurrent layers"
        return self._pages[-1].ids[track.first_needed(self.kv_len) :].reshape(-1, track.num_groups)

    def save(self) -> TableState:
        """The state from which `load` restores this table, given a copy of the used pages."""
        return TableState(self.page_size, self.kv_len, tuple(self.tracks))

    def load(self, state: TableState) -> bool:
        """Restores a saved table with unwritten pages; the table must be empty. Returns False as `reserve` does."""
        assert self.is_empty, "only an empty table is loaded"
        assert len(state.tracks) == len(self.tracks), "a table of another model"
        if not self._take(state.ends):
            return False
        self.kv_len, self.tracks = state.kv_len, list(state.tracks)
        return True

    def reserve(self, num_tokens: int) -> bool:
        """Allocates pages for `num_tokens` tokens in all; returns False and takes none if the pool has too few."""
        if num_tokens <= self._num_reserved:
            return True
        missing = [track.num_pages(num_tokens, self.page_size) - len(pages) for track, pages in self._kinds()]
        if max(missing) > 0 and not self._take([max(0, num_pages) for num_pages in missing]):
            return False
        self._num_reserved = -(-num_tokens // self.page_size) * self.page_size
        return True

    def could_have(self, num_pages: int, others: Iterable[Self]) -> bool:
        """Whether it could have `num_pages` pages, its own included, if the `others` released theirs."""
        num_available = self._pool.num_free + self._pool.num_freeable(other.pages for other in others)
        return num_pages - self.num_pages <= num_available

    def adopt(self, kv_len: int, pages: Iterable[Sequence[int]]) -> None:
        """Shares another table's full pages of the first `kv_len` tokens, given for each kind of layers."""
        assert self.is_empty, "only an empty table adopts pages"
        assert kv_len % self.page_size == 0, "only full pages are shared"
        self.kv_len = kv_len
        for kind, adopted in enumerate(pages):
            self._pool.share(adopted)
            self._pages[kind].extend(adopted)
            track = self.tracks[kind]
            num_kept = len(adopted) // track.num_groups * track.unit(self.page_size)
            self.tracks[kind] = replace(track, num_evicted=kv_len - num_kept)

    def adopt_from(self, other: Self, kv_len: int) -> None:
        """Shares the full pages of another session's first `kv_len` tokens."""
        left = other.save().cut(kv_len).whole()
        self.adopt(left.kv_len, [pages.ids[:end].tolist() for pages, end in zip(other._pages, left.ends, strict=True)])
        self.tracks = list(left.tracks)

    def begin_behind(self, position: int) -> None:
        """Continues at a later position, as if there had never been tokens between the sinks and it.

        Only the sinks may be in the cache. Sliding-window layers do not see them from there.
        """
        for kind, track in enumerate(self.tracks):
            assert isinstance(track, Track), "a state that never was"
            if track.window is not None:
                self._give_up(kind, self.kv_len)
            assert track.window is not None or self.kv_len == track.num_sinks, "more or less than the sinks"
            self.tracks[kind] = track.from_origin(position)
        self.kv_len = position

    def evict(self, num_tokens: int) -> None:
        """Releases the pages of the first `num_tokens` tokens behind the sinks, which the window has evicted."""
        for kind, track in enumerate(self.tracks):
            if isinstance(track, Track) and track.window is None and num_tokens > track.num_evicted:
                assert self.kv_len >= track.num_sinks + num_tokens, "only what is in the cache is evicted"
                self._give_up(kind, num_tokens)

    def slide(self, context_len: int) -> None:
        """Releases pages that sliding-window layers no longer see in a context of `context_len` tokens, and old states.

        Pages that are needed after a rewind by the slack are kept. If less than the context is in the cache, the
        tokens behind it are still to be computed, and the pages that they see are kept too.
        """
        for kind, track in enumerate(self.tracks):
            self.tracks[kind], hidden = track.slid(self.kv_len, context_len, self.page_size)
            for part in reversed(hidden):
                self._pool.release(self._pages[kind].remove(part))

    def truncate(self, kv_len: int) -> None:
        """Drops every token from position `kv_len` on, and the pages that only they needed.

        A page cut in the middle will be written again. If it is shared it is dropped too, with its last tokens.
        """
        if kv_len >= self.kv_len:
            self.trim()
            return
        left = self.save().cut(kv_len)
        rest = left.kv_len % self.page_size
        if rest:
            ends = zip(self._kinds(), left.ends, strict=True)
            last_pages = [
                page for (track, pages), end in ends for page in pages.ids[:end][-track.num_groups :].tolist()
            ]
            if any(map(self._pool.is_shared, last_pages)):
                left = left.cut(left.kv_len - rest)
            else:
                self._pool.overwrite(last_pages)
        self.kv_len, self.tracks = left.kv_len, list(left.tracks)
        self.trim()

    def drop_newest_state(self) -> None:
        """Goes back to the last state of a whole block: a step that is not committed has written over the newest."""
        for track in self.tracks:
            if isinstance(track, StateTrack):
                self.truncate(track.full_len(self.kv_len, self.page_size))

    def trim(self) -> None:
        """Releases the pages behind the last token in the cache."""
        for track, pages in self._kinds():
            end = track.num_pages(self.kv_len, self.page_size)
            if end < len(pages):
                self._pool.release(pages.truncate(end))
        self._num_reserved = 0

    def check_integrity(self) -> None:
        """Asserts that all visible tokens in the cache have a page."""
        for track, pages in self._kinds():
            assert track.num_pages(self.kv_len, self.page_size) <= len(pages), "KV beyond its pages"
            assert len(pages) % track.num_groups == 0, "a group of layers without its page"
            assert not track.num_evicted or track.num_evicted + track.num_sinks <= self.kv_len, "sinks without KV"
            assert track.holds(self.kv_len), "what the next token sees is gone"

    def _kinds(self) -> Iterator[tuple[Track | StateTrack, PageList]]:
        return zip(self.tracks, self._pages, strict=True)

    def _take(self, nums_pages: Sequence[int]) -> bool:
        """Allocates more pages for each kind of layers; returns False and takes none if the pool has too few."""
        taken = self._pool.allocate(sum(nums_pages))
        if taken is None:
            return False
        for pages, num_pages in zip(self._pages, nums_pages, strict=True):
            pages.extend(taken[:num_pages])
            del taken[:num_pages]
        return True

    def _give_up(self, kind: int, num_evicted: int) -> None:
        track = self.tracks[kind]
        assert isinstance(track, Track), "states are not evicted"
        hidden = track.hidden_pages(num_evicted, self.page_size)
        self._pool.release(self._pages[kind].remove(hidden))
        self.tracks[kind] = replace(track, num_evicted=num_evicted)
