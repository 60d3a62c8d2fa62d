"""Who owns which page of the KV cache. Knows page numbers and counts; knows no tensors and no sessions.

A page is as good as any other: whichever layers it serves (see `LayerGroups`), it comes from here and goes back here.

free ──allocate──▶ owned (count 1) ──share──▶ shared (count > 1)
  ▲                    │                           │
  └──────release───────┴──────────release──────────┘   (a page is free again when its count is 0)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


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
