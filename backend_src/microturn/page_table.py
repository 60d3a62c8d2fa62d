"""Which pages a session has, and for which of its tokens. Knows page numbers and lengths, no tensors, no sessions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Self

import numpy as np

from microturn.kv_pool import PagePool
from microturn.page_list import PageIds, PageList
from microturn.page_track import Track


@dataclass(frozen=True)
class TableState:
    """A table without its pages: with what stood in them, it can be made anew. Plain numbers, fit for a file.

    Attributes:
        page_size: tokens in a page.
        kv_len: position of the first token that is not in the cache.
        tracks: what each kind of layers keeps of the tokens before it.
    """

    page_size: int
    kv_len: int
    tracks: tuple[Track, ...] = (Track(),)

    @property
    def num_pages(self) -> int:
        """Pages with tokens in the cache."""
        return sum(self.ends)

    @property
    def ends(self) -> list[int]:
        """The same for each kind of layers: where in its list the pages end that have tokens in the cache."""
        return [track.num_pages(self.kv_len, self.page_size) for track in self.tracks]

    def num_pages_with(self, num_tokens: int) -> int:
        """Pages for these and so many tokens behind them."""
        return sum(track.num_pages(self.kv_len + num_tokens, self.page_size) for track in self.tracks)

    def cut(self, kv_len: int) -> Self:
        """Of a table that forgets every token from position `kv_len` on; its used pages are the first ones of these.

        Where some layers keep no more what the next token would see, nothing is kept, or no more than the sinks.
        """
        kv_len = min(self.kv_len, kv_len)
        candidates = kv_len, min(kv_len, max(track.num_sinks for track in self.tracks)), 0
        left = next(left for left in candidates if all(track.reaches(left) for track in self.tracks))
        return replace(self, kv_len=left, tracks=tuple(track.cut(left) for track in self.tracks))


class PageTable:
    """The pages of one session: for each kind of layers a list, in the order of its positions.

        sees all      | 7       | 2       | 9       |
        window of 3   | gone    | 4       | 1       |
        tokens        | ■ ■ ■ ■ | ■ ■ ■ ■ | ■ ■ □ □ |     ■ in the cache (up to kv_len)   □ allocated only

    Where a kind of layers keeps some tokens no more (see `Track`), their pages are gone, and the others close up. A
    kind of several groups has as many pages in a row for the same tokens.

    Args:
        pool: where its pages come from and go back to.
        tracks: what each kind of layers keeps, nothing yet.
    """

    def __init__(self, pool: PagePool, tracks: Iterable[Track] = (Track(),)) -> None:
        self._pool = pool
        self.page_size = pool.page_size
        self.tracks = list(tracks)
        assert not any(track.num_sinks % self.page_size for track in self.tracks), "sinks are whole pages"
        self._pages = [PageList() for _ in self.tracks]
        self.kv_len = 0

    @property
    def pages(self) -> list[int]:
        """All of them, one kind of layers after the other; a list that is made for who asks."""
        return list(chain.from_iterable(ids.tolist() for ids in self.page_ids))

    @property
    def page_ids(self) -> list[PageIds]:
        """The same as arrays that are there already, one for each kind of layers."""
        return [pages.ids for pages in self._pages]

    @property
    def num_pages(self) -> int:
        """How many they are."""
        return sum(map(len, self._pages))

    @property
    def slides(self) -> bool:
        """Whether some layers have a window of their own."""
        return any(track.window is not None for track in self.tracks)

    @property
    def is_empty(self) -> bool:
        """Whether it has no pages."""
        return not any(self._pages)

    @property
    def used_pages(self) -> list[int]:
        """The pages with tokens in the cache, in the order of these, whichever layers they serve."""
        return self.used_between(0, self.save().num_pages)

    def used_between(self, first: int, last: int) -> list[int]:
        """Some of the used pages, from index `first` to before `last`."""
        used = [pages.ids[:end] for pages, end in zip(self._pages, self.save().ends, strict=True)]
        if len(used) == 1:
            return list(used[0][first:last].tolist())
        numbers = np.concatenate([track.page_numbers(self.kv_len, self.page_size) for track in self.tracks])
        return list(np.concatenate(used)[numbers.argsort(kind="stable")[first:last]].tolist())

    def full_pages(self, kind: int) -> dict[int, list[int]]:
        """The full pages of a kind of layers, one for each of its groups, by which page of the session they are."""
        numbers = self.tracks[kind].page_numbers(self.kv_len - self.kv_len % self.page_size, self.page_size)
        found: dict[int, list[int]] = {}
        for number, page in zip(numbers.tolist(), self._pages[kind].ids.tolist(), strict=False):
            found.setdefault(number, []).append(page)
        return found

    def seen(self, num_evicted: int) -> list[tuple[Track, PageIds]]:
        """What each kind of layers keeps for who does not see so many tokens, at least as many as have been evicted.

        What stood before the table's origin (see `begin_behind`) nobody sees. The page ids are no copies where nothing
        is hidden that is kept, and stay as they are.
        """
        found = []
        for track, pages in self._kinds():
            num_unseen = max(num_evicted, track.num_hidden)
            if track.window is None and track.num_evicted != num_unseen:
                hidden = track.hidden_pages(num_unseen, self.page_size)
                found.append((replace(track, num_evicted=num_unseen), pages.without(hidden)))
            else:
                found.append((track, pages.ids))
        return found

    def save(self) -> TableState:
        """What `load` makes this table from again, with a copy of the used pages."""
        return TableState(self.page_size, self.kv_len, tuple(self.tracks))

    def load(self, state: TableState) -> bool:
        """Makes an empty table what another was, with pages that have still to be written; False as in `reserve`."""
        assert self.is_empty, "only an empty table is loaded"
        assert len(state.tracks) == len(self.tracks), "a table of another model"
        if not self._take(state.ends):
            return False
        self.kv_len, self.tracks = state.kv_len, list(state.tracks)
        return True

    def reserve(self, num_tokens: int) -> bool:
        """Takes the pages that so many tokens need in all; False, and nothing is taken, when the pool has too few."""
        missing = [track.num_pages(num_tokens, self.page_size) - len(pages) for track, pages in self._kinds()]
        return max(missing) <= 0 or self._take([max(0, num_pages) for num_pages in missing])

    def could_have(self, num_pages: int, others: Iterable[Self]) -> bool:
        """Whether there would be so many pages for it, its own included, if these others gave up theirs."""
        num_available = self._pool.num_free + self._pool.num_freeable(other.pages for other in others)
        return num_pages - self.num_pages <= num_available

    def adopt(self, kv_len: int, pages: Iterable[Sequence[int]]) -> None:
        """Shares the full pages, for each kind of layers, that somebody else has of the first `kv_len` tokens."""
        assert self.is_empty, "only an empty table adopts pages"
        assert kv_len % self.page_size == 0, "only full pages are shared"
        self.kv_len = kv_len
        for kind, adopted in enumerate(pages):
            self._pool.share(adopted)
            self._pages[kind].extend(adopted)
            num_kept = len(adopted) // self.tracks[kind].num_groups * self.page_size
            self.tracks[kind] = replace(self.tracks[kind], num_evicted=kv_len - num_kept)

    def adopt_from(self, other: Self, kv_len: int) -> None:
        """Begins with the full pages of another session's first tokens."""
        left = other.save().cut(kv_len)
        left = left.cut(left.kv_len - left.kv_len % self.page_size)
        self.adopt(left.kv_len, [pages.ids[:end].tolist() for pages, end in zip(other._pages, left.ends, strict=True)])
        self.tracks = list(left.tracks)

    def begin_behind(self, position: int) -> None:
        """Goes on at a later position, as if nothing had ever stood between the sinks and that.

        The sinks are in the cache, and nothing else is. Layers with a window of their own do not see them from there.
        """
        for kind, track in enumerate(self.tracks):
            if track.window is not None:
                self._give_up(kind, self.kv_len)
            assert track.window is not None or self.kv_len == track.num_sinks, "more or less than the sinks"
            self.tracks[kind] = track.from_origin(position)
        self.kv_len = position

    def evict(self, num_tokens: int) -> None:
        """Gives up what the session shows no more: the first tokens behind the sinks, so many in all; whole pages."""
        for kind, track in enumerate(self.tracks):
            if track.window is None and num_tokens > track.num_evicted:
                assert self.kv_len >= track.num_sinks + num_tokens, "only what is in the cache is evicted"
                self._give_up(kind, num_tokens)

    def slide(self, context_len: int) -> None:
        """Gives up what layers' own windows show no more, wherever from so long a context on the session goes on.

        It may be cut back by the slack, too; and where less than that is in the cache, it is computed from there on.
        """
        for kind, track in enumerate(self.tracks):
            num_unseen = track.num_unseen(min(self.kv_len, context_len - track.slack - 1), self.page_size)
            if num_unseen > track.num_evicted:
                self._give_up(kind, num_unseen)

    def truncate(self, kv_len: int) -> None:
        """Forgets every token from position `kv_len` on, and the pages that only they needed.

        A page cut in the middle will be written again. Where it is shared it goes too, with its last few tokens.
        """
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

    def trim(self) -> None:
        """Gives up the pages behind the last token in the cache."""
        for pages, end in zip(self._pages, self.save().ends, strict=True):
            self._pool.release(pages.truncate(end))

    def check_integrity(self) -> None:
        """Asserts that all tokens in the cache have a page, but for those that nobody sees."""
        for track, pages in self._kinds():
            assert track.num_pages(self.kv_len, self.page_size) <= len(pages), "KV beyond its pages"
            assert len(pages) % track.num_groups == 0, "a group of layers without its page"
            assert not track.num_evicted or track.num_evicted + track.num_sinks <= self.kv_len, "sinks without KV"
            assert track.reaches(self.kv_len), "what the next token sees is gone"

    def _kinds(self) -> Iterator[tuple[Track, PageList]]:
        return zip(self.tracks, self._pages, strict=True)

    def _take(self, nums_pages: Sequence[int]) -> bool:
        """Takes so many pages more for each kind of layers; False, and none is taken, when the pool has too few."""
        taken = self._pool.allocate(sum(nums_pages))
        if taken is None:
            return False
        for pages, num_pages in zip(self._pages, nums_pages, strict=True):
            pages.extend(taken[:num_pages])
            del taken[:num_pages]
        return True

    def _give_up(self, kind: int, num_evicted: int) -> None:
        hidden = self.tracks[kind].hidden_pages(num_evicted, self.page_size)
        self._pool.release(self._pages[kind].remove(hidden))
        self.tracks[kind] = replace(self.tracks[kind], num_evicted=num_evicted)
