"""Offloaded KV: the copy, and a session's view of it.

    device ──▶ HOST ──▶ WRITING ──▶ DISK ──▶ READING ──▶ HOST ──▶ device
                 │                   │          │
                 └───────────────────┴──────────┴──▶ LOST: its sessions recompute it from their tokens
    another server ──▶ ARRIVED ──▶ device

A copy never changes. Forks share it, and a session that is rewound only records how much of it still counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from microturn.kv.image import KVImage
from microturn.kv.page_table import PageTable
from microturn.kv.table_state import TableState
from microturn.kv.transfer import DONE, Transfer


class Place(Enum):
    """Where a copy is."""

    ARRIVED = auto()
    HOST = auto()
    WRITING = auto()
    DISK = auto()
    READING = auto()
    LOST = auto()


@dataclass(eq=False)
class StoredImage:
    """The KV of one page table as it was when it was offloaded.

    Attributes:
        state: of the page table.
        num_bytes: of its pages in host memory; a file is no larger.
        on_unused: called when the last session has released it.
        pages: in `ARRIVED`, `HOST` and `WRITING`, the content of the pages.
        place: the tier it is in.
        was_in_file: whether it was read from a file.
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
    """A session's view of its KV while that is not in the pool.

    Attributes:
        image: the copy.
        state: of the table to restore: that of the copy, or cut back since.
        moved_s: when it was offloaded, by the engine's clock.
        num_copied: pages whose load into the session's table has begun, once that has pages.
        load_transfer: the latest one.
    """

    image: StoredImage
    state: TableState
    moved_s: float
    num_copied: int = 0
    load_transfer: Transfer = DONE

    @property
    def kv_len(self) -> int:
        """Tokens that need not be recomputed."""
        return 0 if self.image.is_lost else self.state.kv_len

    def cut(self, kv_len: int) -> None:
        """Drops every token from position `kv_len` on."""
        self.state = self.state.cut(kv_len)

    def branch(self, kv_len: int) -> StoredKV:
        """The same KV, up to `kv_len`, for another session."""
        self.image.num_users += 1
        return StoredKV(self.image, self.state.cut(kv_len), self.moved_s)

    def place_in(self, table: PageTable) -> bool:
        """Allocates the pages in an empty table, not yet loaded; returns False if the pool has too few."""
        self.num_copied = 0
        return table.load(self.state)

    def release(self) -> None:
        """Ends this session's use of the copy."""
        self.image.num_users -= 1
        if not self.image.num_users:
            self.image.on_unused(self.image)
