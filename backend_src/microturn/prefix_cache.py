"""Full pages of earlier contexts, found by what stands in them and before them.

A page's key is a hash over its token ids and the key of the page before it, so that equal keys mean equal prefixes.
Knows pages and ids; knows no sessions. Contexts with embeddings are not shared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from microturn.context import Context
from microturn.kv_pool import PagePool, PageTable


class PrefixCache:
    """Pages kept for who begins with the same tokens; they give way before any session's do.

    Args:
        pool: where the pages are counted.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        # The least recently used first; within a prefix the pages at its end, since without them the rest is of use.
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def adopt(self, table: PageTable, context: Context) -> None:
        """Begins an empty table with the longest known prefix of a context, short of its last token."""
        known = []
        for key in self._keys(context, max(0, len(context) - 1)):
            if key not in self._pages:
                break
            known.append(key)
        table.adopt([self._pages[key] for key in known])
        for key in reversed(known):
            self._pages.move_to_end(key)

    def publish(self, table: PageTable, context: Context) -> None:
        """Keeps the full pages of a context that is about to be given up."""
        keys = list(self._keys(context, table.kv_len))
        for key, page in reversed(list(zip(keys, table.pages, strict=False))):
            if key not in self._pages:
                self._pool.share([page])
                self._pages[key] = page
            self._pages.move_to_end(key)

    def evict(self) -> bool:
        """Gives up the least recently used page; False when there is none."""
        if not self._pages:
            return False
        _, page = self._pages.popitem(last=False)
        self._pool.release([page])
        return True

    def owned(self) -> list[list[int]]:
        """The page lists that the cache owns, for the pool's integrity check."""
        return [list(self._pages.values())]

    def _keys(self, context: Context, num_tokens: int) -> Iterator[bytes]:
        """Keys of the full pages that the first tokens fill."""
        if context.embeds:
            return
        key = b""
        size = self._pool.page_size
        for first in range(0, num_tokens - size + 1, size):
            ids = array("q", context.token_ids[first : first + size]).tobytes()
            key = hashlib.blake2b(key + ids, digest_size=16).digest()
            yield key
