"""A parked session on its way out of the pool."""

from __future__ import annotations

from dataclasses import dataclass

from microturn.kv.image import KVImage
from microturn.kv.table_state import TableState
from microturn.sessions.session import Session


@dataclass
class Saving:
    """A parked session that is being offloaded and is still complete in the pool.

    Attributes:
        parking: number of the session's parking; a turn in between changes it.
        num_copied: pages copied so far.
    """

    session: Session
    parking: int | None
    state: TableState
    image: KVImage
    num_copied: int = 0
