"""Forecasts which offloaded sessions will have a turn soon, from their beats."""

from __future__ import annotations

import heapq
from itertools import count
from weakref import ReferenceType, ref

from microturn.sessions.session import Session


class Forecast:
    """Offloaded sessions with a regular beat, by the time from which their KV is wanted."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, ReferenceType[Session]]] = []
        self._entry_numbers = count()

    @property
    def next_s(self) -> float | None:
        """When the next session is due, by the engine's clock."""
        return self._entries[0][0] if self._entries else None

    def note(self, session: Session, now_s: float) -> None:
        """Adds an offloaded session. One that is already due was evicted for others, and is not brought back."""
        wanted_s = session.beat.wanted_s
        if wanted_s is not None and wanted_s > now_s:
            heapq.heappush(self._entries, (wanted_s, next(self._entry_numbers), ref(session)))

    def due(self, now_s: float) -> list[Session]:
        """The sessions that have become due and are still offloaded; each is returned once."""
        sessions = []
        while self._entries and self._entries[0][0] <= now_s:
            wanted_s, _, entry = heapq.heappop(self._entries)
            session = entry()
            if session is not None and is_away(session) and session.beat.wanted_s == wanted_s:
                sessions.append(session)
        return sessions


def is_away(session: Session) -> bool:
    """Whether a session has no turn, and KV outside the pool."""
    return session.running is None and session.stored is not None
