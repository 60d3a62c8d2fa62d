"""Where saved sessions come back to life: whose they are, whether they are the newest copy, whether there is room, and
whether the KV that they bring along can be used here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from microturn.admission import check_room
from microturn.errors import Expired, FailedPrecondition, MicroturnError, PermissionDenied
from microturn.kv_image import PagePart
from microturn.ownership import check_owner, is_owner
from microturn.session import Session
from microturn.session_table import SessionTable
from microturn.settings import Settings
from microturn.snapshots.claimed_kv import ClaimedKV
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.file import keep_header
from microturn.snapshots.kv_part import KVPart
from microturn.snapshots.session_state import Host, restore_session
from microturn.snapshots.snapshot import Snapshot
from microturn.tiers.storage import Storage
from microturn.tiers.stored_kv import StoredKV
from microturn.turn import TurnRequest

log = logging.getLogger(__name__)


class Arrivals:
    """Takes saved sessions up, on the engine's thread.

    Args:
        settings: the limits.
        sessions: those that live.
        host: what saved sessions find here.
        directory: where those are that clients may ask for; None is nowhere.
        storage: takes the KV that they bring along.
        page_parts: what a page consists of here.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: SessionTable,
        host: Host,
        directory: SnapshotDirectory | None,
        storage: Storage,
        page_parts: Sequence[PagePart],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._host = host
        self._directory = directory
        self._storage = storage
        self._page_parts = page_parts

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

    def admit(self, snapshot: Snapshot, claim: Callable[[], Path]) -> Session:
        """Makes a snapshot a living session.

        Args:
            snapshot: the session.
            claim: takes the snapshot out, and says where it is then; called when nothing else can go wrong.

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
        self._sessions.accounts.check(session, 0)
        self._take_kv(session, snapshot.kv, claim())
        self._sessions.add(session)
        return session

    def _take_kv(self, session: Session, part: KVPart | None, path: Path) -> None:
        """Leaves the KV of a claimed snapshot to the session's next turn, where it can be used, or drops it."""
        try:
            if part is not None:
                trouble = self._trouble_with(part, session)
                if trouble is None:
                    image = self._storage.bring(ClaimedKV(path, part))
                    session.stored = StoredKV(image, part.state, self._host.clock())
                    return
                log.warning("the KV of session %s is computed again: %s", session.id, trouble)
            keep_header(path)
        except OSError as error:
            log.warning("%s keeps its content until it expires: %s", path, error)

    def _trouble_with(self, part: KVPart, session: Session) -> str | None:
        """Why KV that was saved cannot be used for a session here; None when it can."""
        if not part.is_of(self._page_parts):
            return "it was saved with another kv_dtype or page_size"
        is_of_table = part.state.cut(0) == session.table.save()
        if not is_of_table or not 0 < part.state.kv_len < len(session.context):
            return "it is not that of the session's tokens"
        return None

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
