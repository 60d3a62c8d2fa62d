"""Restores saved sessions on START. A requested session has its place among the sessions at once, is read and claimed
on a background thread, and is live when that is done. Other servers are asked for it first: what is saved of a session
that lives is older. And takes sessions that another server hands over.

All methods run on the engine thread and access no file there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from microturn.errors import FailedPrecondition
from microturn.kv.image import PagePart
from microturn.kv.stored import Place, StoredKV
from microturn.offload.background import Background
from microturn.offload.file_thread import Outcome
from microturn.offload.storage import Storage
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable
from microturn.sessions.turn import SessionId, TurnRequest
from microturn.settings import Settings
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.restoring import RestoredSession, SnapshotRestorer, check_up_to_date
from microturn.snapshots.snapshot import Header

log = logging.getLogger(__name__)

# Expired snapshots contain plain text until they are removed.
_PURGE_S = 600.0

OnDone = Callable[[Exception | None], None]
# Has the session that a request resumes handed over from another server; returns whether it lives on one. Raises
# Unavailable, with the route to it, where it must stay there. May block.
Fetch = Callable[[TurnRequest], bool]


@dataclass(eq=False)
class _Pending:
    """A saved session that is being looked for or claimed.

    Attributes:
        tenant: the tenant that it counts for.
        on_done: called with the outcome; None if no client waits.
        may_come: whether another server may hand it over.
    """

    tenant: str | None
    on_done: OnDone | None
    may_come: bool = False

    def is_wanted(self) -> bool:
        """Whether a client waits; callable in any thread."""
        return self.on_done is not None


class Arrivals:
    """Restores saved sessions.

    Args:
        settings: the limits.
        sessions: the live sessions.
        environment: what restored sessions find here.
        directory: the snapshots that clients may resume; None for none.
        storage: takes the KV in their snapshots.
        page_parts: of a page in this server.
        files: removes what is not needed in the directory.
        look_ups: looks for sessions.
        fetch: see `Fetch`; None if there are no other servers.
        load_ahead: has the KV loaded of a session that another server has handed over.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: SessionTable,
        environment: SessionEnvironment,
        directory: SnapshotDirectory | None,
        storage: Storage,
        page_parts: Sequence[PagePart],
        files: Background,
        look_ups: Background,
        fetch: Fetch | None,
        load_ahead: Callable[[Session], None],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._environment = environment
        self._directory = directory
        self._restorer = (
            None if directory is None else SnapshotRestorer(directory, environment, page_parts, self._check)
        )
        self._storage = storage
        self._files = files
        self._look_ups = look_ups
        self._fetch = fetch
        self._load_ahead = load_ahead
        self._pending: dict[SessionId, _Pending] = {}
        self._is_closed = False
        self._next_purge_s = environment.clock()
        self._is_purging = False

    @property
    def is_busy(self) -> bool:
        """Whether any saved session is being looked for or claimed."""
        return bool(self._pending)

    # ---- START ---------------------------------------------------------------------------------------------------

    def may_come(self, request: TurnRequest) -> bool:
        """Whether a turn asks for a session that is not live and may be saved, or live elsewhere."""
        session_id = request.session_id
        if not request.start or self._sessions.find(session_id) is not None:
            return False
        return self._directory is not None or session_id in self._pending or self._may_be_elsewhere(request)

    def _may_be_elsewhere(self, request: TurnRequest) -> bool:
        return self._fetch is not None and not request.opens

    def ask(self, request: TurnRequest, on_done: OnDone) -> None:
        """Looks for the session of a START and restores it.

        Args:
            request: of a session that `may_come`. One request at a time, until `on_done` is called or it is given up.
            on_done: called with None when the session is live or there is none, else with the error: Unavailable with
                a route where it lives elsewhere.

        Raises:
            ResourceExhausted: there is no room for it.
        """
        session_id = request.session_id
        pending = self._pending.get(session_id)
        if pending is not None:  # an earlier request gave up, or the session is being imported
            pending.on_done = lambda _: self._ask_again(request, on_done)
            return
        self._sessions.check_room(self._settings, request.options.get("tenant"))
        pending = self._expect(session_id, request.options.get("tenant"), on_done)
        pending.may_come = self._may_be_elsewhere(request)
        self._look(request, pending)

    def give_up(self, session_id: SessionId) -> None:
        """Withdraws a request: its client has gone."""
        if session_id in self._pending:
            self._pending[session_id].on_done = None

    def _ask_again(self, request: TurnRequest, on_done: OnDone) -> None:
        """Repeats a request after an earlier one for the same session has ended, with or without success."""
        if not self.may_come(request):
            on_done(None)
            return
        try:
            self.ask(request, on_done)
        except Exception as error:
            on_done(error)

    def _look(self, request: TurnRequest, pending: _Pending) -> None:
        session_id, restorer = request.session_id, self._restorer
        newest_epoch = self._sessions.newest_epoch(session_id)

        def restore() -> RestoredSession | None:
            return None if restorer is None else restorer.restore(request, newest_epoch, pending.is_wanted)

        def work() -> RestoredSession | None:
            # One that lives is newer than what is saved of it.
            has_come = self._fetch is not None and pending.may_come and self._fetch(request)
            return None if has_come else restore()

        def end(outcome: Outcome[RestoredSession | None]) -> None:
            # Another server has handed it over meanwhile: that one is newer, and may have ended again.
            has_come = self._sessions.newest_epoch(session_id) != newest_epoch
            if outcome.value is not None:
                assert restorer is not None
                put_back = partial(restorer.put_back, outcome.value)
                if self._is_closed:
                    put_back()  # no turn is served any more that this could delay
                elif has_come:
                    self._files.submit(put_back, _ignore)
                else:
                    self._add(outcome.value)
            self._end(session_id, None if has_come else outcome.error)

        self._look_ups.submit(work, end)

    # ---- import --------------------------------------------------------------------------------------------------

    def expect(self, session: Session, header: Header) -> None:
        """Reserves the place of a session that the caller will claim, until `admit` or `withdraw`.

        Raises:
            FailedPrecondition: it is live here, is being restored, or is out of date.
            ResourceExhausted: there is no room for it.
        """
        if self._sessions.find(header.session_id) is not None:
            raise FailedPrecondition(f"session '{header.session_id}' is live here: close it first")
        if header.session_id in self._pending:
            raise FailedPrecondition(f"session '{header.session_id}' is being restored: try again")
        check_up_to_date(header, self._sessions.newest_epoch(header.session_id))
        self._sessions.check_room(self._settings, header.tenant)
        self._check(session)
        self._expect(header.session_id, header.tenant, None)

    def receive(self, taken: RestoredSession, header: Header, epoch_before: int) -> None:
        """Makes a session live that another server hands over.

        An older copy of it that lives here gives way: its server was not told that an earlier hand-over had succeeded.

        Args:
            taken: the session.
            header: of its snapshot.
            epoch_before: that it had before it was handed over. A copy that was left behind has an older one than the
                session that went on, whichever is handed over.

        Raises:
            FailedPrecondition: it is live here, is being restored, or is out of date.
            ResourceExhausted: there is no room for it.
        """
        session_id = header.session_id
        older, pending = self._sessions.find(session_id), self._pending.get(session_id)
        is_same = older is not None and (older.key, older.tenant) == (header.key, header.tenant)
        if older is not None and (older.running or not older.rests or not is_same):
            raise FailedPrecondition(f"session '{session_id}' is live here")
        check_up_to_date(header, self._sessions.newest_epoch(session_id), epoch_before)
        if pending is not None and not pending.may_come:
            raise FailedPrecondition(f"session '{session_id}' is being restored: try again")
        if older is None and pending is None:  # else it has its place
            self._sessions.check_room(self._settings, header.tenant)
        self._sessions.accounts.check(taken.session, 0, replaced=older)
        if older is not None:
            self._sessions.end(older, "replaced")
        self._add(taken)

    def admit(self, taken: RestoredSession) -> None:
        """Makes a reserved session live after it has been claimed."""
        self._add(taken)
        self.withdraw(taken.session.id)

    def withdraw(self, session_id: SessionId) -> None:
        """Ends a reservation, whether or not the session was admitted."""
        self._end(session_id, None)

    # ---- the directory -------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float | None:
        """When to purge the directory next, by the engine's clock."""
        return None if self._directory is None or self._is_purging else self._next_purge_s

    def purge(self) -> None:
        """Removes expired snapshots if it is time."""
        next_s, now_s = self.next_s, self._environment.clock()
        if self._directory is None or next_s is None or now_s < next_s:
            return
        self._is_purging = True
        self._next_purge_s = now_s + min(_PURGE_S, self._directory.ttl_s)
        self._files.submit(self._directory.purge, self._has_purged)

    def close(self) -> None:
        """Stops restoring: claimed sessions are put back for another server."""
        self._is_closed = True
        for pending in self._pending.values():
            pending.on_done = None

    def _check(self, session: Session) -> None:
        """Checks that there is room for a session. Also called by file threads: it only reads numbers."""
        self._sessions.accounts.check(session, 0)

    def _has_purged(self, outcome: Outcome[None]) -> None:
        self._is_purging = False
        if outcome.error is not None:
            log.error("expired snapshots could not be removed: %s", outcome.error)

    def _expect(self, session_id: SessionId, tenant: str | None, on_done: OnDone | None) -> _Pending:
        self._sessions.keep_place(tenant)
        pending = self._pending[session_id] = _Pending(tenant, on_done)
        return pending

    def _end(self, session_id: SessionId, error: Exception | None) -> None:
        pending = self._pending.pop(session_id)
        self._sessions.free_place(pending.tenant)
        if pending.on_done is not None:
            pending.on_done(error)

    def _add(self, taken: RestoredSession) -> None:
        session = taken.session
        if taken.kv is not None:
            image = self._storage.bring(taken.kv)
            session.stored = StoredKV(image, taken.kv.state, self._environment.clock())
        else:
            self._files.submit(taken.drop_content, _ignore)
        session.last_activity_s = self._environment.clock()
        self._sessions.add(session)
        if session.stored is not None and session.stored.image.place is Place.ARRIVED:
            self._load_ahead(session)


def _ignore(outcome: Outcome[None]) -> None:
    """Ignores an outcome: errors were logged there, or the next look-up repeats the work."""
