"""Copies a session's KV for a file while the session continues.

    pages of the pool ── shared, copied in shares between steps ──▶ KVCopy
    offloaded copy    ── read in the caller's thread ────────────▶ KVCopy

A shared page keeps its content up to the session's length at the start: a session that is rewound takes another page.
Only the newest recurrent state is written again: it is copied at the start.
The caller waits for each share before asking for the next one, so that on a GPU no long queue of copies builds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from microturn.kv.image import KVImage
from microturn.kv.page_table import TableState
from microturn.kv.pool import PagePool
from microturn.kv.tensors import KVTensors
from microturn.offload.storage import Storage
from microturn.sessions.session import Session


@dataclass(frozen=True)
class KVCopy:
    """The KV of one session.

    Attributes:
        state: of the page table that can be restored from it.
        pages: the content of that table's pages.
    """

    state: TableState
    pages: KVImage


@dataclass(eq=False)
class Copying:
    """A copy in progress.

    Attributes:
        state: of the page table that is copied.
        num_bytes: of its pages.
        read: reads an image whose first pages are those wanted. Not on the engine thread: it may read a file.
        held: pages of the pool that the copy still shares.
        num_copied: copied pages, counted from the first.
        image: the target of the copy.
        num_early: last pages that were copied at the start: a recurrent state is written again with each step.
    """

    state: TableState
    num_bytes: int
    read: Callable[[], KVImage]
    held: list[int] = field(default_factory=list)
    num_copied: int = 0
    image: KVImage | None = None
    num_early: int = 0

    @property
    def num_to_copy(self) -> int:
        """Pages that are copied one share after the other."""
        return len(self.held) - self.num_early

    def settle(self) -> None:
        """Waits in the caller's thread for the pages copied so far."""
        if self.image is not None:
            self.image.store_transfer.wait()


class KVCopies:
    """Makes copies. All methods but `finish` run on the engine thread.

    Args:
        pool: the pages.
        kv: their content.
        storage: offloaded KV.
    """

    def __init__(self, pool: PagePool, kv: KVTensors, storage: Storage) -> None:
        self._pool = pool
        self._kv = kv
        self._storage = storage
        self._open: set[Copying] = set()

    def owned(self) -> Iterator[list[int]]:
        """The pages that each copy shares."""
        return (copying.held for copying in self._open)

    def begin(self, session: Session) -> Copying | None:
        """Begins to copy the KV of a session as of its last committed point; returns None if it has none.

        The caller calls `advance` until it returns True, with `Copying.settle` in between, always `end`, then `finish`.
        """
        state = session.table.save() if session.stored is None else session.stored.state
        state = state.cut(min(session.kv_len, max(0, session.committed_len - 1)))  # a lost copy has none
        if not state.kv_len:
            return None
        if session.stored is not None:
            return Copying(state, state.num_pages * self._kv.bytes_per_page, self._storage.reader(session.stored.image))
        image = self._kv.new_image(state.num_pages)
        held = session.table.used_pages[: state.num_pages]
        copying = Copying(state, image.num_bytes, lambda: image, held, image=image, num_early=state.num_rewritten)
        if copying.num_early:
            self._kv.read(held[copying.num_to_copy :], image, copying.num_to_copy)
        self._pool.share(copying.held)
        self._open.add(copying)
        return copying

    def advance(self, copying: Copying) -> bool:
        """Copies some more pages; returns True when all are copied."""
        if copying in self._open:
            assert copying.image is not None
            pages = copying.held[copying.num_copied : copying.num_to_copy][: self._kv.share.for_later]
            self._kv.read(pages, copying.image, copying.num_copied)
            copying.num_copied += len(pages)
        return copying.num_copied == copying.num_to_copy

    def end(self, copying: Copying) -> None:
        """Stops sharing pages, whether or not all have been copied."""
        if copying in self._open:
            self._open.remove(copying)
            self._pool.release(copying.held)

    def finish(self, copying: Copying) -> KVCopy:
        """Returns the copy; runs in the caller's thread.

        Raises:
            OSError, DamagedFile: it was in a file that could not be read.
        """
        pages = copying.read()
        if pages.num_pages > copying.state.num_pages:
            pages = pages.first(copying.state.num_pages, self._kv.new_image)
        return KVCopy(copying.state, pages)
