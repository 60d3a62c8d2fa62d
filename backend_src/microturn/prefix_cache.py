"""Full pages of earlier prompts, found by what stands in them and before them.

A page's key is a hash over its token ids and the key of the page before it, the first one's over a salt, so that equal
keys mean equal prefixes among those who share the salt. Contexts with embeddings are not shared. Knows pages and ids;
knows no sessions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator

from microturn.context import Context
from microturn.kv_pool import PagePool, PageTable


class PrefixCache:
    """Pages kept for who begins with the same tokens; those that no session holds give way before any session's do.

    A session whose window slides shares no more than `max_len` tokens: those behind have seen less than others have.


    Args:
        pool: where the pages are counted.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        # The least recently used first; within a prefix the pages at its end, since without them the rest is of use.
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def adopt(self, table: PageTable, context: Context, salt: str = "", *, max_len: int | None = None) -> None:
        """Begins an empty table with the longest known prefix of a context, short of its last token."""
        known = []
        for key in self._keys(context, max(0, len(context) - 1), salt, max_len):
            if key not in self._pages:
                break
            known.append(key)
        table.adopt([self._pages[key] for key in known])
        for key in reversed(known):
            self._pages.move_to_end(key)

    def publish(self, table: PageTable, context: Context, salt: str = "", *, max_len: int | None = None) -> None:
        """Keeps the full pages of a context; their owner no longer writes them."""
        keys = list(self._keys(context, table.kv_len, salt, max_len))
        for key, page in reversed(list(zip(keys, table.prefix, strict=False))):
            if key not in self._pages:
                self._pool.share([page])
                self._pages[key] = page
            self._pages.move_to_end(key)

    def evict(self) -> bool:
        """Frees the least recently used page that only the cache owns; False when there is none."""
        for _ in range(len(self._pages)):
            key, page = self._pages.popitem(last=False)
            if not self._pool.is_shared(page):
                self._pool.release([page])
                return True
            self._pages[key] = page  # a session uses it: nothing would come free
        return False

    def owned(self) -> list[list[int]]:
        """The page lists that the cache owns, for the pool's integrity check."""
        return [list(self._pages.values())]

    def _keys(self, context: Context, num_tokens: int, salt: str, max_len: int | None) -> Iterator[bytes]:
        """Keys of the full pages that the first tokens fill, `max_len` of them at most."""
        num_tokens = num_tokens if max_len is None else min(num_tokens, max_len)
        if context.embeds:
            return
        key = salt.encode()
        size = self._pool.page_size
        for first in range(0, num_tokens - size + 1, size):
            ids = array("q", context.token_ids[first : first + size]).tobytes()
            key = hashlib.blake2b(key + ids, digest_size=16).digest()
            yield key
