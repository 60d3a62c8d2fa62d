"""KV that is copied for a file while its session goes on.

    pages of the pool ── shared, a step's share copied after the other ──▶ KVCopy
    a copy outside the pool ── read by who wants it, in its own thread ──▶ KVCopy

A page that is shared keeps what stands in it up to where the session had come: who cuts its context back takes another.
Who wants the copy waits for each share before asking for the next one, so that on a GPU no long row of them is under
way. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from microturn.kv_image import KVImage
from microturn.kv_pool import PagePool
from microturn.kv_tensors import KVTensors
from microturn.page_table import TableState
from microturn.session import Session
from microturn.tiers.storage import Storage


@dataclass(frozen=True)
class KVCopy:
    """The KV of one session.

    Attributes:
        state: of the table that can be made from it.
        pages: what stands in that table's pages.
    """

    state: TableState
    pages: KVImage


@dataclass(eq=False)
class Copying:
    """A copy that is being made.

    Attributes:
        state: what it will be of.
        num_bytes: what its pages take.
        read: reads pages of which the first ones are those wanted. Not for the engine's thread: there may be a file.
        held: pages of the pool that are still shared.
        num_copied: of these.
        image: where these are copied to.
    """

    state: TableState
    num_bytes: int
    read: Callable[[], KVImage]
    held: list[int] = field(default_factory=list)
    num_copied: int = 0
    image: KVImage | None = None

    def settle(self) -> None:
        """Waits for what has been copied so far, in the thread of who wants it."""
        if self.image is not None:
            self.image.filling.wait()


class KVCopies:
    """Makes copies. All but `finish` belongs to the engine's thread.

    Args:
        pool: the pages.
        kv: what stands in them.
        storage: KV outside the pool.
    """

    def __init__(self, pool: PagePool, kv: KVTensors, storage: Storage) -> None:
        self._pool = pool
        self._kv = kv
        self._storage = storage
        self._open: set[Copying] = set()

    def owned(self) -> Iterator[list[int]]:
        """The pages that copies share, a list for each."""
        return (copying.held for copying in self._open)

    def begin(self, session: Session) -> Copying | None:
        """Begins to copy the KV of a session as of its last committed point; None when it has none.

        `advance` goes on with it until it says that it is done, with `Copying.settle` in between; `end` is called in
        any case, then `finish`.
        """
        state = session.table.save() if session.stored is None else session.stored.state
        state = state.cut(min(session.kv_len, max(0, session.committed_len - 1)))  # of a copy that is lost, nothing
        if not state.kv_len:
            return None
        if session.stored is not None:
            return Copying(state, state.num_pages * self._kv.bytes_per_page, self._storage.reader(session.stored.image))
        image = self._kv.new_image(state.num_pages)
        held = session.table.used_pages[: state.num_pages]
        copying = Copying(state, image.num_bytes, lambda: image, held, image=image)
        self._pool.share(copying.held)
        self._open.add(copying)
        return copying

    def advance(self, copying: Copying) -> bool:
        """Copies some pages more; says whether these were the last ones."""
        if copying in self._open:
            assert copying.image is not None
            pages = copying.held[copying.num_copied : copying.num_copied + self._kv.share.for_later]
            self._kv.read(pages, copying.image, copying.num_copied)
            copying.num_copied += len(pages)
        return copying.num_copied == len(copying.held)

    def end(self, copying: Copying) -> None:
        """Shares no pages any more, whether all have been copied or not."""
        if copying in self._open:
            self._open.remove(copying)
            self._pool.release(copying.held)

    def finish(self, copying: Copying) -> KVCopy:
        """The copy, in the thread of who wants it.

        Raises:
            OSError, DamagedFile: it was in a file, and could not be read.
        """
        pages = copying.read()
        if pages.num_pages > copying.state.num_pages:
            pages = pages.first(copying.state.num_pages, self._kv.new_image)
        return KVCopy(copying.state, pages)
