"""Who owns which page of the KV cache. Knows page numbers and counts; knows no tensors and no sessions.

free ──allocate──▶ owned (count 1) ──share──▶ shared (count > 1)
  ▲                    │                           │
  └──────release───────┴──────────release──────────┘   (a page is free again when its count is 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self


class PagePool:
    """Pages of a fixed number of tokens, with reference counts.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [0] * num_pages
        # A stack: the page freed last is the one most likely still in the cache of a core.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Takes pages out of the pool, or None when there are too few: then none is taken."""
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def num_freeable(self, owners: Iterable[Sequence[int]]) -> int:
        """Pages that would be free if these owners released theirs: not those that somebody else shares."""
        references = Counter(page for pages in owners for page in pages)
        return sum(count == self._counts[page] for page, count in references.items())

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one owner, so that none of them may write it."""
        return self._counts[page] > 1

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that have one."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is free"
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes one owner from each page; pages without an owner are free."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is free already"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free.append(page)

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Asserts the invariants, given the page lists of all owners.

        free + owned = all, no page both free and owned, none twice in a list, counts equal to the references.
        """
        references: Counter[int] = Counter()
        for pages in owners:
            assert len(set(pages)) == len(pages), f"a page stands twice in {pages}"
            references.update(pages)
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not set(self._free) & set(references), "a page is both free and owned"
        assert len(self._free) + len(references) == self.num_pages, "a page is neither free nor owned"
        for page, count in enumerate(self._counts):
            assert count == references[page], f"page {page} has count {count} and {references[page]} owners"


@dataclass(frozen=True)
class TableState:
    """A table without its pages: with what stood in them, it can be made anew. Plain numbers, fit for a file.

    Attributes:
        page_size: tokens in a page.
        kv_len: position of the first token that is not in the cache.
        num_sinks: first tokens, which are never evicted.
        num_evicted: tokens behind them that are not in the cache any more.
    """

    page_size: int
    kv_len: int
    num_sinks: int = 0
    num_evicted: int = 0

    @property
    def num_pages(self) -> int:
        """Pages with tokens in the cache."""
        return self.num_pages_with(0)

    def num_pages_with(self, num_tokens: int) -> int:
        """Pages for these and so many tokens behind them."""
        return -(-(self.kv_len + num_tokens - self.num_evicted) // self.page_size)

    def cut(self, kv_len: int) -> Self:
        """Of a table that forgets every token from position `kv_len` on; its pages are the first ones of these.

        Who cuts into what was evicted keeps no more than the sinks.
        """
        kv_len = min(self.kv_len, kv_len)
        if kv_len < self.num_sinks + self.num_evicted:
            return replace(self, kv_len=min(kv_len, self.num_sinks), num_evicted=0)
        return replace(self, kv_len=kv_len)


class PageTable:
    """The pages of one session, in the order of its positions.

        pages    | 7       | 2       | 9       |
        tokens   | ■ ■ ■ ■ | ■ ■ ■ ■ | ■ ■ □ □ |     ■ in the cache (up to kv_len)   □ allocated only

    Behind the first `num_sinks` tokens some may have been evicted: their pages are gone, the others close up.

    Args:
        pool: where its pages come from and go back to.
        num_sinks: tokens that are never evicted; they fill whole pages.
    """

    def __init__(self, pool: PagePool, num_sinks: int = 0) -> None:
        assert num_sinks % pool.page_size == 0, "sinks are whole pages"
        self._pool = pool
        self._num_sinks = num_sinks
        self.page_size = pool.page_size
        self.pages: list[int] = []
        self.kv_len = 0
        self.num_evicted = 0

    @property
    def prefix(self) -> list[int]:
        """The pages from the beginning on, up to where tokens have been evicted."""
        return self.pages[: self._num_sinks // self.page_size] if self.num_evicted else self.pages

    def visible(self, num_evicted: int) -> list[int]:
        """The pages that are left for who sees so many tokens less: at least as many as have been evicted."""
        assert num_evicted >= self.num_evicted, "evicted tokens are asked for"
        first, num_hidden = self._hidden_pages(num_evicted)
        return self.pages[:first] + self.pages[first + num_hidden :]

    @property
    def used_pages(self) -> list[int]:
        """The pages with tokens in the cache, in their order."""
        return self.pages[: self.save().num_pages]

    def save(self) -> TableState:
        """What `load` makes this table from again, with a copy of the used pages."""
        return TableState(self.page_size, self.kv_len, self._num_sinks, self.num_evicted)

    def load(self, state: TableState) -> bool:
        """Makes an empty table what another was; its used pages have still to be written.

        Returns:
            False, and nothing is taken, when the pool has too few pages.
        """
        assert not self.pages, "only an empty table is loaded"
        pages = self._pool.allocate(state.num_pages)
        if pages is None:
            return False
        self.pages, self.kv_len, self.num_evicted = pages, state.kv_len, state.num_evicted
        return True

    def reserve(self, num_tokens: int) -> bool:
        """Takes the pages that so many tokens need in all; False, and nothing is taken, when the pool has too few."""
        num_pages = self.save().num_pages_with(num_tokens - self.kv_len)
        pages = self._pool.allocate(max(0, num_pages - len(self.pages)))
        if pages is None:
            return False
        self.pages += pages
        return True

    def could_have(self, num_pages: int, others: Iterable[Self]) -> bool:
        """Whether there would be so many pages for it, its own included, if these others gave up theirs."""
        num_available = self._pool.num_free + self._pool.num_freeable(other.pages for other in others)
        return num_pages - len(self.pages) <= num_available

    def adopt(self, pages: Sequence[int], num_evicted: int = 0) -> None:
        """Begins with full pages that somebody else has computed; they are shared, and never written from now on."""
        assert not self.pages, "only an empty table adopts pages"
        self._pool.share(pages)
        self.pages = list(pages)
        self.num_evicted = num_evicted
        self.kv_len = len(pages) * self.page_size + num_evicted

    def adopt_from(self, other: Self, kv_len: int) -> None:
        """Begins with the full pages of another session's first tokens."""
        kv_len = min(kv_len, other.kv_len)
        if kv_len < self._num_sinks + other.num_evicted:
            self.adopt(other.prefix[: min(kv_len, self._num_sinks) // self.page_size])
        else:
            self.adopt(other.pages[: (kv_len - other.num_evicted) // self.page_size], other.num_evicted)

    def evict(self, num_tokens: int) -> None:
        """Gives up the pages of the first tokens behind the sinks, so many in all; they fill whole pages."""
        if num_tokens <= self.num_evicted:
            return
        assert self.kv_len >= self._num_sinks + num_tokens, "only what is in the cache is evicted"
        first, num_hidden = self._hidden_pages(num_tokens)
        self._pool.release(self.pages[first : first + num_hidden])
        del self.pages[first : first + num_hidden]
        self.num_evicted = num_tokens

    def truncate(self, kv_len: int) -> None:
        """Forgets every token from position `kv_len` on, and the pages that only they needed.

        A page cut in the middle will be written again. Where it is shared it goes too, with its last few tokens.
        """
        left = self.save().cut(kv_len)
        rest = (left.kv_len - left.num_evicted) % self.page_size
        if rest and self._pool.is_shared(self.pages[left.num_pages - 1]):
            left = left.cut(left.kv_len - rest)
        self._pool.release(self.pages[left.num_pages :])
        del self.pages[left.num_pages :]
        self.kv_len, self.num_evicted = left.kv_len, left.num_evicted

    def check_integrity(self) -> None:
        """Asserts that all tokens in the cache have a page."""
        assert self.kv_len - self.num_evicted <= len(self.pages) * self.page_size, "KV beyond its pages"
        assert not self.num_evicted or self.kv_len >= self._num_sinks + self.num_evicted, "sinks without KV"

    def _hidden_pages(self, num_evicted: int) -> tuple[int, int]:
        """Which pages such an eviction takes away from those that are left: the first of them, and how many."""
        return self._num_sinks // self.page_size, (num_evicted - self.num_evicted) // self.page_size
