"""Where saved sessions come back to life: whose they are, whether they are the newest copy, whether there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from microturn.admission import check_room
from microturn.errors import Expired, FailedPrecondition, MicroturnError, PermissionDenied
from microturn.ownership import check_owner, is_owner
from microturn.session import Session
from microturn.session_table import SessionTable
from microturn.settings import Settings
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.session_state import Host, restore_session
from microturn.snapshots.snapshot import Snapshot
from microturn.turn import TurnRequest

log = logging.getLogger(__name__)


class Arrivals:
    """Takes saved sessions up, on the engine's thread.

    Args:
        settings: the limits.
        sessions: those that live.
        host: what saved sessions find here.
        directory: where those are that clients may ask for; None is nowhere.
    """

    def __init__(
        self, settings: Settings, sessions: SessionTable, host: Host, directory: SnapshotDirectory | None
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._host = host
        self._directory = directory

    def take_up(self, request: TurnRequest) -> None:
        """Takes the session of a START up that is saved in the directory, as if it had lived here all the time.

        START with `resume` then goes on with it, and any other replaces it.

        Raises:
            PermissionDenied: it belongs to somebody else.
            MicroturnError: why START with `resume` cannot go on with it; for any other START that is no obstacle.
        """
        if self._directory is None or self._sessions.find(request.session_id) is not None:
            return
        try:
            self._take_up(self._directory, request)
        except PermissionDenied:
            raise
        except MicroturnError as error:
            if not request.opens:
                raise
            log.warning("session %s begins anew, beside what is saved of it: %s", request.session_id, error)

    def admit(self, snapshot: Snapshot, claim: Callable[[], None]) -> Session:
        """Makes a snapshot a living session.

        Args:
            snapshot: the session.
            claim: takes the snapshot out; called when nothing else can go wrong.

        Raises:
            FailedPrecondition: it lives here, is out of date, or is of another model.
            ResourceExhausted: there is no room for it.
            MicroturnError: what `claim` raises.
        """
        header = snapshot.header
        if self._sessions.find(header.session_id) is not None:
            raise FailedPrecondition(f"session '{header.session_id}' lives here: close it first")
        if header.epoch <= self._sessions.newest_epoch(header.session_id):
            raise FailedPrecondition(f"this copy of session '{header.session_id}' is out of date: it went on since")
        check_room(self._settings, self._sessions, header.tenant)
        session = restore_session(snapshot, self._host)
        claim()
        self._sessions.add(session)
        log.info("session %s is taken up with %d tokens", session.id, len(session.context))
        return session

    def _take_up(self, directory: SnapshotDirectory, request: TurnRequest) -> None:
        snapshot = directory.find(request.session_id)
        if snapshot is None:
            return
        if directory.is_expired(snapshot):
            directory.remove(request.session_id)
            if is_owner(snapshot.header, request):
                raise Expired(f"session '{request.session_id}' was saved too long ago: open a new one with START")
            return
        check_owner(snapshot.header, request)
        self.admit(snapshot, partial(directory.claim, snapshot))
