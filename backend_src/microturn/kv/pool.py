"""The page pool of the KV cache: allocation and reference counts.

All pages are alike, whichever layers they serve (see `LayerGroups`).

free ──allocate──▶ owned (count 1) ──share──▶ shared (count > 1)
  ▲                    │                           │
  └──────release───────┴──────────release──────────┘   (a page has no owner again when its count is 0)

The prefix cache may *keep* pages: their content can be reused until the page is allocated again. Keeping a page is not
owning it. A kept page without owners counts as free and is allocated last, the one released longest ago first. This is
the free queue of vLLM's block pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PagePool:
    """Pages of a fixed number of tokens, with reference counts.

    Args:
        num_pages: pages in the pool.
        page_size: tokens in a page.

    Attributes:
        on_lost: called with each kept page whose content is lost because it is allocated or written again.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_lost: Callable[[int], None] = lambda _page: None
        self._counts = [0] * num_pages
        # A stack: the page freed last is most likely still in a core's cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._kept: set[int] = set()
        # Kept pages without owners, the one released longest ago first.
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can return: those without owners, kept or not."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Pages with an owner, or kept."""
        return self.num_pages - len(self._free)

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Allocates pages; returns None and takes none if there are too few."""
        if num_pages > self.num_free:
            return None
        pages = []
        for _ in range(num_pages):
            if not self._free:
                self._lose(next(iter(self._evictable)))
            pages.append(self._free.pop())
        for page in pages:
            self._counts[page] = 1
        return pages

    def num_freeable(self, owners: Iterable[Sequence[int]]) -> int:
        """Pages that would be free if these owners released theirs: not those that other owners share."""
        references = Counter(page for pages in owners for page in pages)
        return sum(count == self._counts[page] for page, count in references.items())

    def is_shared(self, page: int) -> bool:
        """Whether a page has more than one owner, so that no owner may write it."""
        return self._counts[page] > 1

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to pages that have one, or that are kept."""
        for page in pages:
            assert self._counts[page] > 0 or page in self._kept, f"page {page} is free"
            self._counts[page] += 1
            self._evictable.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Takes one owner from each page.

        Args:
            pages: in the order of their tokens. Kept pages are evicted from the last on: a page of a prefix is useless
                without those before it.
        """
        for page in reversed(pages):
            assert self._counts[page] > 0, f"page {page} is free already"
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._kept:
                    self._evictable[page] = None
                else:
                    self._free.append(page)

    def keep(self, pages: Iterable[int]) -> None:
        """Keeps the content of pages that have an owner."""
        for page in pages:
            assert self._counts[page] > 0, f"page {page} is free"
            assert page not in self._kept, f"page {page} is kept already"
            self._kept.add(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Stops keeping pages."""
        for page in pages:
            self._kept.remove(page)
            if self._counts[page] == 0:
                del self._evictable[page]
                self._free.append(page)

    def overwrite(self, pages: Iterable[int]) -> None:
        """Declares that their only owner writes these pages again: kept content is lost."""
        for page in pages:
            assert self._counts[page] == 1, f"page {page} is shared"
            if page in self._kept:
                self._lose(page)

    def check_integrity(self, owners: Iterable[Sequence[int]], kept: Iterable[int] = ()) -> None:
        """Asserts the invariants, given the page lists of all owners and the pages that the prefix cache keeps.

        free + evictable + owned = all, no page in two of them, none twice in a list, counts equal to the references.
        """
        references: Counter[int] = Counter()
        for pages in owners:
            assert len(set(pages)) == len(pages), f"a page stands twice in {pages}"
            references.update(pages)
        free = {*self._free, *self._evictable}
        assert len(free) == len(self._free) + len(self._evictable), "a page is free twice"
        assert not free & set(references), "a page is both free and owned"
        assert len(free) + len(references) == self.num_pages, "a page is neither free nor owned"
        for page, count in enumerate(self._counts):
            assert count == references[page], f"page {page} has count {count} and {references[page]} owners"
        assert self._kept == set(kept), "the pool keeps other pages than the cache"
        assert set(self._evictable) == self._kept - set(references), "evictable pages are kept and have no owner"

    def _lose(self, page: int) -> None:
        self.forget([page])
        self.on_lost(page)
