"""Copies a session's KV for a file while the session continues.

    pages of the pool ── shared, copied in shares between steps ──▶ KVCopy
    offloaded copy    ── read in the caller's thread ────────────▶ KVCopy

A shared page keeps its content up to the session's length at the start: a session that is rewound takes another page.
Only the newest recurrent state is written again: it is copied at the start.
The caller waits for each share before asking for the next one, so that on a GPU no long queue of copies builds up.

A session that goes on while it is copied is copied once more at the end: without the pages that it still has of the
first copy, as long as that shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from microturn.kv.image import KVImage
from microturn.kv.pool import PagePool
from microturn.kv.table_state import TableState
from microturn.kv.tensors import KVTensors
from microturn.offload.storage import Storage
from microturn.sessions.session import Session


@dataclass(frozen=True)
class KVCopy:
    """The KV of one session.

    Attributes:
        state: of the page table that can be restored from it.
        pages: the content of that table's pages, but for the first `num_before`.
        num_before: pages that are in an earlier copy, as its first ones.
    """

    state: TableState
    pages: KVImage
    num_before: int = 0


@dataclass(eq=False)
class Copying:
    """A copy in progress.

    Attributes:
        state: of the page table that is copied.
        num_bytes: of the pages that are copied.
        read: reads an image whose first pages are those wanted. Not on the engine thread: it may read a file.
        held: pages of the pool that the copy still shares.
        num_copied: copied pages, counted from the first.
        image: the target of the copy.
        num_early: last pages that were copied at the start: a recurrent state is written again with each step.
        num_before: first pages of the table that are not copied: see `KVCopy`.
        is_open: whether it shares pages of the pool.
    """

    state: TableState
    num_bytes: int
    read: Callable[[], KVImage]
    held: list[int] = field(default_factory=list)
    num_copied: int = 0
    image: KVImage | None = None
    num_early: int = 0
    num_before: int = 0
    is_open: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all pages have been copied, or none is to be."""
        return self.num_copied == self.num_to_copy

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

    def num_kept(self, session: Session, before: Copying) -> int:
        """Pages of an earlier copy, complete and not ended, that a copy now would begin with unchanged."""
        whole = before.held[: before.state.whole().num_pages]
        return 0 if session.stored is not None else _num_equal(whole, session.table.used_pages)

    def num_unchanged(self, session: Session, before: TableState) -> int:
        """Pages of an earlier copy that a copy now would begin with unchanged, by what was cut since: `kv_floor`."""
        whole = before.cut(session.kv_floor).whole()
        now = session.table.save()
        is_same = session.stored is None and whole.tracks == now.tracks and whole.kv_len <= now.kv_len
        return whole.num_pages if is_same else 0

    def begin(self, session: Session, num_before: int = 0) -> Copying | None:
        """Begins to copy the KV of a session as of its last committed point; returns None if it has none.

        The caller calls `advance` until it returns True, with `Copying.settle` in between, always `end`, then `finish`.

        Args:
            session: whose.
            num_before: first pages that are left out, since they are in an earlier copy.
        """
        state = session.table.save() if session.stored is None else session.stored.state
        state = state.cut(min(session.kv_len, max(0, session.committed_len - 1)))  # a lost copy has none
        if not state.kv_len:
            return None
        if session.stored is not None:
            return Copying(state, state.num_pages * self._kv.bytes_per_page, self._storage.reader(session.stored.image))
        num_before = min(num_before, state.num_pages)
        held = session.table.used_pages[num_before : state.num_pages]
        image = self._kv.new_image(len(held))
        num_early = min(state.num_rewritten, len(held))
        copying = Copying(
            state, image.num_bytes, lambda: image, held, image=image, num_early=num_early, num_before=num_before
        )
        if copying.num_early:
            self._kv.read(held[copying.num_to_copy :], image, copying.num_to_copy)
        self._pool.share(copying.held)
        copying.is_open = True
        self._open.add(copying)
        return copying

    def advance(self, copying: Copying) -> bool:
        """Copies some more pages; returns True when all are copied."""
        if copying.is_open:
            assert copying.image is not None
            pages = copying.held[copying.num_copied : copying.num_to_copy][: self._kv.share.for_later]
            self._kv.read(pages, copying.image, copying.num_copied)
            copying.num_copied += len(pages)
        return copying.is_complete

    def end(self, copying: Copying) -> None:
        """Stops sharing pages, whether or not all have been copied."""
        if copying.is_open:
            copying.is_open = False
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
        return KVCopy(copying.state, pages, copying.num_before)


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
