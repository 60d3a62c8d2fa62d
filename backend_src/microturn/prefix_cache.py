"""Full pages of earlier prompts, found by what stands in them and before them.

A page's key is a hash over its token ids and the key of the page before it, the first one's over a salt, so that equal
keys mean equal prefixes among those who share the salt. Each kind of layers has pages of its own under the same key; of
those with a window only the last ones of a prefix are of use, so that the others need not be there, and give way by
themselves. Contexts with embeddings are not shared. Knows pages and ids; knows no sessions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

from microturn.context import Context
from microturn.kv_pool import PagePool
from microturn.page_table import PageTable


class PrefixCache:
    """Pages kept for who begins with the same tokens; those that no session holds give way before any session's do.

    A session whose window slides shares no more than `max_len` tokens: those behind have seen less than others have.

    Args:
        pool: where the pages are counted.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        # By the number of the kind of layers, and the key. The least recently used first; within a prefix the pages at
        # its end, since without them the rest is of use.
        self._pages: OrderedDict[tuple[int, bytes], list[int]] = OrderedDict()

    def adopt(self, table: PageTable, context: Context, salt: str = "", *, max_len: int | None = None) -> None:
        """Begins an empty table with the longest known prefix of a context, short of its last token."""
        known: list[bytes] = []
        num_best, runs = 0, [0] * len(table.tracks)  # how many pages in a row each kind of layers has, up to this one
        for key in self._keys(context, max(0, len(context) - 1), salt, max_len):
            runs = [run + 1 if (kind, key) in self._pages else 0 for kind, run in enumerate(runs)]
            if not any(runs):
                break
            known.append(key)
            if all(len(known) - run <= first for run, first in zip(runs, self._first_seen(table, known), strict=True)):
                num_best = len(known)
        del known[num_best:]
        firsts = self._first_seen(table, known)
        table.adopt(
            len(known) * self._pool.page_size,
            [
                list(chain.from_iterable(self._pages[kind, key] for key in known[first:]))
                for kind, first in enumerate(firsts)
            ],
        )
        for number, key in reversed(list(enumerate(known))):
            for kind, first in enumerate(firsts):
                if number >= first:
                    self._pages.move_to_end((kind, key))

    def publish(self, table: PageTable, context: Context, salt: str = "", *, max_len: int | None = None) -> None:
        """Keeps the full pages of a context; their owner no longer writes them."""
        keys = list(self._keys(context, table.kv_len, salt, max_len))
        full_pages = [table.full_pages(kind) for kind in range(len(table.tracks))]
        for number, key in reversed(list(enumerate(keys))):
            for kind, pages in enumerate(full_pages):
                if number not in pages:
                    continue
                if (kind, key) not in self._pages:
                    self._pool.share(pages[number])
                    self._pages[kind, key] = pages[number]
                self._pages.move_to_end((kind, key))

    def evict(self) -> bool:
        """Frees the least recently used pages of some tokens that only the cache owns; False when there are none."""
        for _ in range(len(self._pages)):
            key, pages = self._pages.popitem(last=False)
            if not any(map(self._pool.is_shared, pages)):
                self._pool.release(pages)
                return True
            self._pages[key] = pages  # a session uses them: nothing would come free
        return False

    def owned(self) -> list[list[int]]:
        """The page lists that the cache owns, for the pool's integrity check."""
        return [list(chain.from_iterable(self._pages.values()))]

    def _first_seen(self, table: PageTable, known: Sequence[bytes]) -> list[int]:
        """For each kind of layers, which of so many pages is the first that it needs to go on behind them."""
        size = self._pool.page_size
        return [track.num_unseen(len(known) * size, size) // size for track in table.tracks]

    def _keys(self, context: Context, num_tokens: int, salt: str, max_len: int | None) -> Iterator[bytes]:
        """Keys of the full pages that the first tokens fill, `max_len` of them at most."""
        num_tokens = num_tokens if max_len is None else min(num_tokens, max_len)
        if context.embeds:
            return
        key = salt.encode(errors="surrogatepass")
        size = self._pool.page_size
        for first in range(0, num_tokens - size + 1, size):
            ids = array("q", context.ids_between(first, first + size)).tobytes()
            key = hashlib.blake2b(key + ids, digest_size=16).digest()
            yield key
