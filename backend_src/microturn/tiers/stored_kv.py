"""KV that has left the pool: one copy of it, and what a session knows of its own.

    device ──▶ HOST ──▶ WRITING ──▶ DISK ──▶ READING ──▶ HOST ──▶ device
                 │                   │          │
                 └───────────────────┴──────────┴──▶ LOST: its sessions compute it again from their tokens

A copy never changes. Forks share it, and who cuts its context back only remembers how much of it still counts. Knows
no stores: what becomes of a copy is their business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from microturn.kv_image import KVImage
from microturn.kv_transfer import DONE, Transfer
from microturn.page_table import PageTable, TableState


class Place(Enum):
    """Where a copy is."""

    HOST = auto()
    WRITING = auto()
    DISK = auto()
    READING = auto()
    LOST = auto()


@dataclass(eq=False)
class StoredImage:
    """The KV of one table as it was when it left the pool.

    Attributes:
        state: of the table.
        num_bytes: what its pages take in host memory; a file of them takes no more.
        on_unused: called when the last session has done with it.
        pages: in `HOST` and `WRITING`, what stood in the pages.
        place: where it is.
        was_in_file: whether it has been read from one.
        num_users: sessions that it belongs to.
        wanted_in: the step in which a turn last asked for it.
    """

    state: TableState
    num_bytes: int
    on_unused: Callable[[StoredImage], None]
    pages: KVImage | None
    place: Place = Place.HOST
    was_in_file: bool = False
    num_users: int = 1
    wanted_in: int = -2

    @property
    def is_lost(self) -> bool:
        return self.place is Place.LOST


@dataclass(eq=False)
class StoredKV:
    """What a session knows of its KV while that is not in the pool.

    Attributes:
        image: the copy.
        state: of the table that is made from it: that of the copy, or cut back since.
        moved_s: when it left, by the engine's clock.
        num_copied: pages of which the copy back into the session's table has been begun, once that has pages.
        coming: the copy of these that was begun last.
    """

    image: StoredImage
    state: TableState
    moved_s: float
    num_copied: int = 0
    coming: Transfer = DONE

    @property
    def kv_len(self) -> int:
        """Tokens that need not be computed again."""
        return 0 if self.image.is_lost else self.state.kv_len

    def cut(self, kv_len: int) -> None:
        """Forgets every token from position `kv_len` on."""
        self.state = self.state.cut(kv_len)

    def branch(self, kv_len: int) -> StoredKV:
        """The same KV, up to a length, for another session."""
        self.image.num_users += 1
        return StoredKV(self.image, self.state.cut(kv_len), self.moved_s)

    def place_in(self, table: PageTable) -> bool:
        """Gives an empty table the pages that it takes; False when the pool has too few. What they hold comes later."""
        self.num_copied = 0
        return table.load(self.state)

    def release(self) -> None:
        """This session has done with it."""
        self.image.num_users -= 1
        if not self.image.num_users:
            self.image.on_unused(self.image)
