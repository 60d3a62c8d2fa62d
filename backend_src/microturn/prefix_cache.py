"""Full pages of earlier prompts, found by what stands in them and before them.

A page's key is a hash over its token ids and the key of the page before it, the first one's over a salt, so that equal
keys mean equal prefixes among those who share the salt. Each kind of layers has pages of its own under the same key; of
those with a window only the last ones of a prefix are of use, so that the others need not be there, and give way by
themselves. Contexts with embeddings are not shared. Knows pages and ids; knows no sessions.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from microturn.context import Context
from microturn.kv_pool import PagePool
from microturn.page_table import PageTable

# Which pages: the number of the kind of layers, and what stands in them and before them.
_Key = tuple[int, bytes]


class PrefixCache:
    """Pages kept for sessions that begin with the same tokens. It owns none: the pool takes back what it needs.

    A session whose window slides shares no more than `max_len` tokens: those behind have seen less than others have.

    Args:
        pool: where the pages are kept.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[_Key, list[int]] = {}
        self._key_of: dict[int, _Key] = {}
        pool.on_lost = self._drop

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
        table.adopt(
            len(known) * self._pool.page_size,
            [
                list(chain.from_iterable(self._pages[kind, key] for key in known[first:]))
                for kind, first in enumerate(self._first_seen(table, known))
            ],
        )

    def publish(self, table: PageTable, context: Context, salt: str = "", *, max_len: int | None = None) -> None:
        """Keeps the full pages of a context; their owner no longer writes them."""
        full_pages = [table.full_pages(kind) for kind in range(len(table.tracks))]
        for number, key in enumerate(self._keys(context, table.kv_len, salt, max_len)):
            for kind, pages in enumerate(full_pages):
                if number in pages and (kind, key) not in self._pages:
                    self._keep((kind, key), pages[number])

    def clear(self) -> None:
        """Keeps nothing any more."""
        self._pool.forget(self._key_of)
        self._pages.clear()
        self._key_of.clear()

    @property
    def pages(self) -> Collection[int]:
        """All pages that it keeps."""
        return self._key_of.keys()

    def _keep(self, key: _Key, pages: list[int]) -> None:
        self._pool.keep(pages)
        self._pages[key] = pages
        self._key_of.update(dict.fromkeys(pages, key))

    def _drop(self, page: int) -> None:
        """A page is lost; without it the others of its key, for other groups of layers, are of no use."""
        pages = self._pages.pop(self._key_of[page])
        for other in pages:
            del self._key_of[other]
        self._pool.forget(other for other in pages if other != page)

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
