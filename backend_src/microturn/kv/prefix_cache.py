"""The prefix cache: full pages of earlier prompts, found by their tokens and the tokens before them.

A page's key is a hash over its token ids and the key of the page before it, or a salt for the first page: under one
salt, equal keys mean equal prefixes. Each kind of layers has its own pages under the same key. Sliding-window layers
need only the last pages of a prefix; their other pages are evicted in time. Contexts with embeddings are not shared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from microturn.kv.page_table import PageTable
from microturn.kv.pool import PagePool

# Index of the kind of layers, and the hash.
_Key = tuple[int, bytes]


class Prompt(Protocol):
    """The context that a session begins with.

    Attributes:
        embeds: its embeddings; a prompt with any is not shared.
    """

    @property
    def embeds(self) -> Collection[object]: ...

    def __len__(self) -> int: ...

    def ids_between(self, first: int, last: int) -> Iterable[int]:
        """The token ids from position `first` to before `last`."""
        ...


class PrefixCache:
    """Keeps pages for sessions that begin with the same tokens. It owns none: the pool evicts what it needs.

    A session with a sliding window shares at most `max_len` tokens: the tokens behind did not see all before them.

    Args:
        pool: where the pages are kept.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: dict[_Key, list[int]] = {}
        self._key_of: dict[int, _Key] = {}
        pool.on_lost = self._drop

    def adopt(self, table: PageTable, context: Prompt, salt: str = "", *, max_len: int | None = None) -> None:
        """Gives an empty table the longest cached prefix of a context, excluding its last token."""
        known: list[bytes] = []
        num_best, runs = 0, [0] * len(table.tracks)  # consecutive pages that each kind has up to this one
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

    def publish(self, table: PageTable, context: Prompt, salt: str = "", *, max_len: int | None = None) -> None:
        """Keeps the full pages of a context; their owner must not write them any more."""
        full_pages = [table.full_pages(kind) for kind in range(len(table.tracks))]
        for number, key in enumerate(self._keys(context, table.kv_len, salt, max_len)):
            for kind, pages in enumerate(full_pages):
                if number in pages and (kind, key) not in self._pages:
                    self._keep((kind, key), pages[number])

    def clear(self) -> None:
        """Stops keeping all pages."""
        self._pool.forget(self._key_of)
        self._pages.clear()
        self._key_of.clear()

    @property
    def pages(self) -> Collection[int]:
        """All kept pages."""
        return self._key_of.keys()

    def _keep(self, key: _Key, pages: list[int]) -> None:
        self._pool.keep(pages)
        self._pages[key] = pages
        self._key_of.update(dict.fromkeys(pages, key))

    def _drop(self, page: int) -> None:
        """Drops a lost page and the other pages of its key, which are useless without it."""
        pages = self._pages.pop(self._key_of[page])
        for other in pages:
            del self._key_of[other]
        self._pool.forget(other for other in pages if other != page)

    def _first_seen(self, table: PageTable, known: Sequence[bytes]) -> list[int]:
        """For each kind of layers, the index of the first of the `known` pages that the next token needs."""
        size = self._pool.page_size
        return [track.num_unseen(len(known) * size, size) // size for track in table.tracks]

    def _keys(self, context: Prompt, num_tokens: int, salt: str, max_len: int | None) -> Iterator[bytes]:
        """Keys of the full pages of the first `num_tokens` tokens, or of `max_len` if that is less."""
        num_tokens = num_tokens if max_len is None else min(num_tokens, max_len)
        if context.embeds:
            return
        key = salt.encode(errors="surrogatepass")
        size = self._pool.page_size
        for first in range(0, num_tokens - size + 1, size):
            ids = array("q", context.ids_between(first, first + size)).tobytes()
            key = hashlib.blake2b(key + ids, digest_size=16).digest()
            yield key
