"""Forecasts which offloaded sessions will have a turn soon, from their beats."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from weakref import ReferenceType, WeakKeyDictionary, ref

from microturn.sessions.session import Session

# Maximum waiting sessions that one step looks at.
_MOST_VISITED = 16


class Forecast:
    """Offloaded sessions with a regular beat, by the time from which their KV is wanted.

    Due sessions wait for pages, files and host memory. When any of these has changed, each step looks at a few of them,
    so that its time does not depend on how many wait.
    """

    def __init__(self) -> None:
        self._waiting: WeakKeyDictionary[Session, None] = WeakKeyDictionary()
        # Waiting sessions still to be looked at since `_seen`, what they wait for, has changed.
        self._num_to_visit = 0
        self._seen: tuple[int, ...] = ()
        self._entries: list[tuple[float, int, ReferenceType[Session]]] = []
        self._entry_numbers = count()

    @property
    def next_s(self) -> float | None:
        """When the next session is due, by the engine's clock."""
        return self._entries[0][0] if self._entries else None

    @property
    def has_waiting(self) -> bool:
        """Whether sessions are due and have not been restored."""
        return bool(self._waiting)

    def note(self, session: Session, now_s: float) -> None:
        """Adds an offloaded session. One that is already due was evicted for others, and is not brought back."""
        wanted_s = session.beat.wanted_s
        if wanted_s is not None and wanted_s > now_s:
            heapq.heappush(self._entries, (wanted_s, next(self._entry_numbers), ref(session)))

    def want(self, session: Session) -> None:
        """Adds a session whose KV is outside the pool and wanted now."""
        self._waiting[session] = None
        self._num_to_visit = len(self._waiting)

    def due(self, now_s: float) -> list[Session]:
        """The sessions that have become due and are still offloaded; each is returned once."""
        sessions = []
        while self._entries and self._entries[0][0] <= now_s:
            wanted_s, _, entry = heapq.heappop(self._entries)
            session = entry()
            if session is not None and is_away(session) and session.beat.wanted_s == wanted_s:
                sessions.append(session)
        return sessions

    def visit(
        self, now_s: float, seen: tuple[int, ...], begin: Callable[[Session], bool], may_go_on: Callable[[], bool]
    ) -> bool:
        """Restores due sessions as far as there is room.

        Args:
            now_s: the engine's clock.
            seen: a value that changes with what sessions wait for.
            begin: begins to restore a session; returns False if it has to wait.
            may_go_on: whether another session may begin in this step.

        Returns:
            Whether the next step should go on.
        """
        due = self.due(now_s)
        self._waiting.update(dict.fromkeys(due))
        if due or seen != self._seen:
            self._seen, self._num_to_visit = seen, len(self._waiting)
        for _ in range(min(_MOST_VISITED, self._num_to_visit)):
            if not self._waiting or not may_go_on():
                break
            self._num_to_visit -= 1
            session = next(iter(self._waiting))
            del self._waiting[session]
            if is_away(session) and not begin(session):
                self._waiting[session] = None  # behind the others
        self._num_to_visit = min(self._num_to_visit, len(self._waiting))
        return self._num_to_visit > 0

    def forget(self, session: Session) -> None:
        """Gives up a due session."""
        self._waiting.pop(session, None)


def is_away(session: Session) -> bool:
    """Whether a session has no turn, and KV outside the pool that is not lost."""
    return session.running is None and session.stored is not None and not session.stored.image.is_lost
