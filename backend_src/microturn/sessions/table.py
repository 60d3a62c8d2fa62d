"""The living sessions, those that may give up their pages, and a memory of those that ended."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol
from weakref import ReferenceType, ref

from microturn.errors import Expired, InvalidArgument, MicroturnError, NotFound, ResourceExhausted, Unavailable
from microturn.sessions.accounts import Accounts, ByteLimits
from microturn.sessions.ownership import KeyHash, check_owner, is_owner
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId, TurnRequest
from microturn.settings import Settings

# How many ended sessions are remembered, so that a client that comes back is told why.
NUM_ENDED_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class _Ended:
    """What is remembered of a session that ended: what its owner is told when coming back."""

    error: type[MicroturnError]
    message: str
    key: KeyHash
    epoch: int
    route: str | None


class SessionWatcher(Protocol):
    """Is told which sessions live, on the engine's thread."""

    def session_opened(self, session: Session) -> None:
        """A session lives from now on."""

    def session_ended(self, session: Session, reason: str) -> None:
        """A session has ended (see `SessionTable.end` for the reasons)."""


class SessionTable:
    """The living sessions by id, the order in which idle ones expire, and the memory of those that ended.

    Attributes:
        accounts: of what they take.
        watchers: are told which begin and which end, in this order.

    Args:
        limits: of what they may take.
    """

    def __init__(self, limits: ByteLimits) -> None:
        self.watchers: tuple[SessionWatcher, ...] = ()
        self.accounts = Accounts(limits)
        self._sessions: dict[SessionId, Session] = {}
        # Parked sessions that hold pages, the one parked longest ago first, and which parking it is.
        self._parked: OrderedDict[Session, int] = OrderedDict()
        self._parkings = count()
        # One entry per living session; it may be early, since activity does not move it.
        self._expiries: list[tuple[float, int, ReferenceType[Session]]] = []
        self._entry_numbers = count()
        self._ended: OrderedDict[SessionId, _Ended] = OrderedDict()
        self._num_of_tenant: Counter[str | None] = Counter()
        self._num_kept = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def find(self, session_id: SessionId) -> Session | None:
        return self._sessions.get(session_id)

    def get(self, session_id: SessionId, request: TurnRequest) -> Session:
        """The living session of an id, for a request that may speak for it.

        Raises:
            PermissionDenied, Expired, NotFound: as it is another's, ended or never was.
        """
        session = self._sessions.get(session_id)
        if session is not None:
            check_owner(session, request)
            return session
        ended = self._ended.get(session_id)
        if ended is None or not ended.key.matches(request.options.get("session_key")):
            raise NotFound(f"no session '{session_id}' is here: open one with START")
        # Where one was moved that comes back by START, it is no more: it has been looked for.
        is_back = request.start and request.session_id == session_id
        raise moved(ended.route) if ended.route is not None and not is_back else ended.error(ended.message)

    def route_of(self, request: TurnRequest) -> str | None:
        """The route to the server that a request's session was moved to; None where it was not, or is another's."""
        ended = self._ended.get(request.session_id)
        return ended.route if ended is not None and ended.key.matches(request.options.get("session_key")) else None

    def is_anothers(self, request: TurnRequest) -> bool:
        """Whether a request names a living session for which it may not speak."""
        session = self._sessions.get(request.session_id)
        return session is not None and not is_owner(session, request)

    def find_owned(self, request: TurnRequest) -> Session | None:
        """The living session that a request names, if it may speak for it."""
        session = self._sessions.get(request.session_id)
        return session if session is not None and is_owner(session, request) else None

    def has_parent(self, request: TurnRequest) -> bool:
        """Whether the session that a START branches from lives, whoever's it is."""
        name = request.session_options.fork_of
        return name is not None and self.id_named(name) in self._sessions

    def parent_of(self, request: TurnRequest) -> Session | None:
        """The living session that a START branches from; None where it opens a session of its own.

        Raises:
            InvalidArgument, PermissionDenied, Expired, NotFound: there is none for it.
        """
        name = request.session_options.fork_of
        parent_id = None if name is None else self.id_named(name)
        parent = None if parent_id is None else self.get(parent_id, request)
        if parent is not None and parent.id == request.session_id:
            raise InvalidArgument("a session is not forked into itself: give the branch an id of its own")
        return parent

    def id_named(self, name: str) -> SessionId:
        """The id that a text means: that of a living session, else the integer that it looks like."""
        is_text = name in self._sessions or not (name.isascii() and name.isdecimal())
        return name if is_text else int(name)

    def newest_epoch(self, session_id: SessionId) -> int:
        """The highest epoch of a session that lives or is remembered; 0 when there is none."""
        known = self._sessions.get(session_id) or self._ended.get(session_id)
        return 0 if known is None else known.epoch

    @property
    def num_places(self) -> int:
        """Sessions that live, and those that may be about to."""
        return len(self._sessions) + self._num_kept

    def check_room(self, settings: Settings, tenant: str | None) -> None:
        """Checks that one more session of a tenant may be here.

        Raises:
            ResourceExhausted: it may not.
        """
        if self.num_places >= settings.max_sessions:
            raise ResourceExhausted(
                f"{settings.max_sessions} sessions are open: close one or try again", retry_after_ms=1000
            )
        if tenant is not None and self.num_of_tenant(tenant) >= settings.max_sessions_per_tenant:
            raise ResourceExhausted(
                f"{settings.max_sessions_per_tenant} sessions of this tenant are open: close one or try again",
                retry_after_ms=1000,
            )

    def keep_place(self, tenant: str | None) -> None:
        """Counts a session that does not live yet among the others."""
        self._num_kept += 1
        self._num_of_tenant[tenant] += 1

    def free_place(self, tenant: str | None) -> None:
        """It lives by now, or never will."""
        self._num_kept -= 1
        self._leave(tenant)

    def num_of_tenant(self, tenant: str | None) -> int:
        return self._num_of_tenant[tenant]

    def add(self, session: Session) -> None:
        assert session.id not in self._sessions
        self._sessions[session.id] = session
        self._num_of_tenant[session.tenant] += 1
        self._ended.pop(session.id, None)
        self.accounts.charge(session)
        self._watch(session)
        for watcher in self.watchers:
            watcher.session_opened(session)

    def end(self, session: Session, reason: str = "closed", route: str | None = None) -> None:
        """Takes a session out and gives up its KV.

        Args:
            session: one that lives.
            reason: `closed`, `replaced`, `moved`, `expired` or `failed`.
            route: of the server that it was moved to, if that is known.
        """
        assert session.running is None, "a running turn is ended first"
        del self._sessions[session.id]
        self._leave(session.tenant)
        self.unpark(session)
        self.accounts.close(session)
        session.drop_kv()
        self._ended[session.id] = _ended(session, reason, route)
        if len(self._ended) > NUM_ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        for watcher in self.watchers:
            watcher.session_ended(session, reason)

    def park(self, session: Session) -> None:
        """Notes that a session has no turn, so that its pages may be reclaimed."""
        # One whose turn is paused is parked already, and has pages to give up once that turn ends.
        before = session.table.save() if session in self._parked else None
        session.evict()
        self.accounts.charge(session)
        session.table.trim()
        if not session.table.is_empty and session.table.save() != before:
            self._parked[session] = next(self._parkings)

    def unpark(self, session: Session) -> None:
        self._parked.pop(session, None)

    def parked_longest(self) -> Session | None:
        """The session parked longest ago of those that hold pages."""
        return next(iter(self._parked), None)

    def parking_of(self, session: Session) -> int | None:
        """Which parking it is that a session is in; None when it runs or holds no pages.

        While it is the same one, nothing has changed in the session's pages.
        """
        return self._parked.get(session)

    def expired(self, now_s: float, is_awaited: Callable[[SessionId], bool]) -> list[Session]:
        """The sessions without turns, or whose turn nobody hears, whose idle time has passed; each is named once.

        Args:
            now_s: by the engine's clock.
            is_awaited: whether a turn of a session has come, and is being prepared.
        """
        due = []
        while self._expiries and self._expiries[0][0] <= now_s:
            due.append(heapq.heappop(self._expiries)[2]())
        expired = []
        # All are taken off before any is put back: an idle time may be too short for the clock to move on by it.
        for session in due:
            if session is None or self._sessions.get(session.id) is not session:
                continue
            has_turn = session.running is not None and not session.running.is_paused
            is_busy = has_turn or session.held_as is not None or is_awaited(session.id)
            if not is_busy and session.expires_s <= now_s:
                expired.append(session)
            else:
                self._watch(session, not_before_s=now_s + session.idle_timeout_s if is_busy else 0.0)
        return expired

    def next_expiry_s(self) -> float | None:
        """When to look for expired sessions again, by the engine's clock."""
        return self._expiries[0][0] if self._expiries else None

    def _leave(self, tenant: str | None) -> None:
        self._num_of_tenant[tenant] -= 1
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant]

    def _watch(self, session: Session, not_before_s: float = 0.0) -> None:
        at_s = max(session.expires_s, not_before_s)
        heapq.heappush(self._expiries, (at_s, next(self._entry_numbers), ref(session)))


def moved(route: str | None = None) -> Unavailable:
    """What a turn is told whose session goes on elsewhere.

    Args:
        route: what the client's `x-session-route` leads there by; None where it is not known.
    """
    details = {} if route is None else {"route": route}
    return Unavailable("the session was moved to another server, nothing was appended: go on there", **details)


def _ended(session: Session, reason: str, route: str | None) -> _Ended:
    named, anew = f"session '{session.id}'", "open a new one with START"
    match reason:
        case "expired":
            message = f"{named} was idle for {session.idle_timeout_s:g} s: {anew}"
        case "moved":
            message = f"{named} was moved to another server: go on there, with START and resume"
        case "failed":
            message = f"{named} was closed, since it failed here: {anew}"
        case _:
            message = f"{named} was closed: {anew}"
    return _Ended(Expired if reason == "expired" else NotFound, message, session.key, session.epoch, route)
