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
        kv_len: tokens in the cache.
    """

    page_size: int
    kv_len: int

    @property
    def num_pages(self) -> int:
        """Pages with tokens in the cache."""
        return -(-self.kv_len // self.page_size)

    def cut(self, kv_len: int) -> Self:
        """Of a table that forgets every token from position `kv_len` on; its pages are the first ones of these."""
        return replace(self, kv_len=min(self.kv_len, kv_len))


class PageTable:
    """The pages of one session, in the order of its positions.

        pages    | 7       | 2       | 9       |
        tokens   | ■ ■ ■ ■ | ■ ■ ■ ■ | ■ ■ □ □ |     ■ in the cache (kv_len of them)   □ allocated only

    Args:
        pool: where its pages come from and go back to.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.page_size = pool.page_size
        self.pages: list[int] = []
        self.kv_len = 0

    @property
    def used_pages(self) -> list[int]:
        """The pages with tokens in the cache, in their order."""
        return self.pages[: self.save().num_pages]

    def save(self) -> TableState:
        """What `load` makes this table from again, with a copy of the used pages."""
        return TableState(self.page_size, self.kv_len)

    def load(self, state: TableState) -> bool:
        """Makes an empty table what another was; its used pages have still to be written.

        Returns:
            False, and nothing is taken, when the pool has too few pages.
        """
        assert not self.pages, "only an empty table is loaded"
        pages = self._pool.allocate(state.num_pages)
        if pages is None:
            return False
        self.pages, self.kv_len = pages, state.kv_len
        return True

    def reserve(self, num_tokens: int) -> bool:
        """Takes the pages that so many tokens need in all; False, and nothing is taken, when the pool has too few."""
        pages = self._pool.allocate(max(0, self._pool.num_pages_for(num_tokens) - len(self.pages)))
        if pages is None:
            return False
        self.pages += pages
        return True

    def could_reserve(self, num_tokens: int, others: Iterable[Self]) -> bool:
        """Whether `reserve` would succeed if these others gave up their pages."""
        num_missing = self._pool.num_pages_for(num_tokens) - len(self.pages)
        return num_missing <= self._pool.num_free + self._pool.num_freeable(other.pages for other in others)

    def adopt(self, pages: Sequence[int]) -> None:
        """Begins with full pages that somebody else has computed; they are shared, and never written from now on."""
        assert not self.pages, "only an empty table adopts pages"
        self._pool.share(pages)
        self.pages = list(pages)
        self.kv_len = len(pages) * self._pool.page_size

    def truncate(self, kv_len: int) -> None:
        """Forgets every token from position `kv_len` on, and the pages that only they needed.

        A page cut in the middle will be written again. Where it is shared it goes too, with its last few tokens.
        """
        self.kv_len = min(self.kv_len, kv_len)
        num_full, rest = divmod(self.kv_len, self._pool.page_size)
        if rest and self._pool.is_shared(self.pages[num_full]):
            self.kv_len = num_full * self._pool.page_size
        kept = self._pool.num_pages_for(self.kv_len)
        self._pool.release(self.pages[kept:])
        del self.pages[kept:]
