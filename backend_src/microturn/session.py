"""Sessions, and the table of those that live.

    opening ──▶ parked ⇄ queued ⇄ running ──▶ closed | expired

A session is *running* while it has a turn, *parked* while it has none. Parked sessions keep their pages as long as
nobody needs them; a session without its pages is computed again from its context when its next turn comes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from weakref import ReferenceType, ref

from microturn.codec import Codec
from microturn.context import Context
from microturn.errors import Expired, MicroturnError, NotFound
from microturn.kv_pool import PageTable
from microturn.options import TurnOptions
from microturn.turn import SessionId, Turn

# How many ended sessions are remembered, so that who comes back is told why.
NUM_ENDED_REMEMBERED = 100_000


@dataclass(eq=False)
class Session:
    """One growing sequence.

    Attributes:
        defaults: turn options that START set.
        seed: of the sampling, unless a turn brings its own.
        max_context: tokens it may hold.
        idle_timeout_s: silence after which it expires.
        table: its pages. The last token of a context is never in the cache: its KV comes with the next forward pass,
            so that there is always a token to generate from.
        running: the turn that may change the session; nobody else may.
        queued: turns that wait behind it.
        is_closing: END has come; no turn is taken any more.
    """

    id: SessionId
    codec: Codec
    table: PageTable
    defaults: TurnOptions
    seed: int
    max_context: int
    idle_timeout_s: float
    last_activity_s: float
    context: Context = field(default_factory=Context)
    running: Turn | None = None
    queued: deque[Turn] = field(default_factory=deque)
    num_turns: int = 0
    is_closing: bool = False

    @property
    def open_turns(self) -> list[Turn]:
        """The turns that have not been answered, in their order."""
        return [*self.queued] if self.running is None else [self.running, *self.queued]

    @property
    def kv_target(self) -> int:
        """Tokens that must be in the cache before the running turn can go on or end."""
        assert self.running is not None
        if self.running.generates:
            return len(self.context)
        # A turn that appends nothing needs nothing, even where the session has lost its pages.
        return len(self.context) - 1 if self.running.num_input else 0

    @property
    def num_pending(self) -> int:
        """Tokens that the running turn has still to compute."""
        return max(0, self.kv_target - self.table.kv_len)

    @property
    def expires_s(self) -> float:
        return self.last_activity_s + self.idle_timeout_s


class SessionTable:
    """The living sessions by id, the order in which idle ones expire, and the memory of those that ended."""

    def __init__(self) -> None:
        self._sessions: dict[SessionId, Session] = {}
        # Parked sessions that hold pages, the one parked longest ago first.
        self._parked: OrderedDict[Session, None] = OrderedDict()
        # One entry per living session; it may be early, since activity does not move it.
        self._expiries: list[tuple[float, int, ReferenceType[Session]]] = []
        self._entry_numbers = count()
        self._ended: OrderedDict[SessionId, tuple[type[MicroturnError], str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def find(self, session_id: SessionId) -> Session | None:
        return self._sessions.get(session_id)

    def get(self, session_id: SessionId) -> Session:
        """The living session of this id.

        Raises:
            Expired, NotFound: as it ended or never was.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            return session
        never = (NotFound, f"no session '{session_id}' is here: open one with START")
        error, message = self._ended.get(session_id, never)
        raise error(message)

    def add(self, session: Session) -> None:
        assert session.id not in self._sessions
        self._sessions[session.id] = session
        self._ended.pop(session.id, None)
        self._watch(session)

    def end(self, session: Session, *, expired: bool = False) -> None:
        """Takes a session out and gives its pages back."""
        assert session.running is None, "a running turn is ended first"
        del self._sessions[session.id]
        self.unpark(session)
        session.table.truncate(0)
        self._ended[session.id] = (
            (Expired, f"session '{session.id}' was idle for {session.idle_timeout_s:g} s: open a new one with START")
            if expired
            else (NotFound, f"session '{session.id}' was closed: open a new one with START")
        )
        if len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def park(self, session: Session) -> None:
        """Notes that a session has no turn, so that its pages may be reclaimed."""
        if session.table.pages:
            self._parked[session] = None

    def unpark(self, session: Session) -> None:
        self._parked.pop(session, None)

    def reclaim(self) -> bool:
        """Drops the pages of the session parked longest ago; False when there is none."""
        if not self._parked:
            return False
        session, _ = self._parked.popitem(last=False)
        session.table.truncate(0)
        return True

    def pop_expired(self, now_s: float) -> Session | None:
        """A session without turns whose idle time has passed, or None."""
        while self._expiries and self._expiries[0][0] <= now_s:
            session = heapq.heappop(self._expiries)[2]()
            if session is None or self._sessions.get(session.id) is not session:
                continue
            if session.running is None and session.expires_s <= now_s:
                return session
            self._watch(session, not_before_s=now_s + session.idle_timeout_s if session.running else 0.0)
        return None

    def next_expiry_s(self) -> float | None:
        """When to look for expired sessions again, by the engine's clock."""
        return self._expiries[0][0] if self._expiries else None

    def _watch(self, session: Session, not_before_s: float = 0.0) -> None:
        at_s = max(session.expires_s, not_before_s)
        heapq.heappush(self._expiries, (at_s, next(self._entry_numbers), ref(session)))
