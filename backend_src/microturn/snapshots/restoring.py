"""Reads a saved session for a START and claims it. Runs on a background thread: accesses files, but no live session.

header ──▶ owner, epoch, model ──▶ content, checksum ──▶ session ──▶ claimed by a rename
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from microturn.errors import Expired, FailedPrecondition
from microturn.kv.image import PagePart
from microturn.offload.incoming import KVSource
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.ownership import check_owner, is_owner
from microturn.sessions.session import Session
from microturn.sessions.turn import TurnRequest
from microturn.snapshots.claimed_kv import ClaimedKV, drop_content
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.kv_part import KVPart
from microturn.snapshots.session_state import check_model, restore_session
from microturn.snapshots.snapshot import Header, Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoredSession:
    """A session that was claimed and is not live yet.

    Attributes:
        session: the session.
        kv: its KV, if that can be used here.
        path: of its claimed snapshot; None of one that another server has sent.
    """

    session: Session
    kv: KVSource | None
    path: Path | None = None

    def drop_content(self) -> None:
        """Truncates the snapshot to its header, unless KV is still to be read from it."""
        if self.kv is None and self.path is not None:
            drop_content(self.path)


class SnapshotRestorer:
    """Finds and claims saved sessions.

    Args:
        directory: of the snapshots.
        environment: what restored sessions find here.
        page_parts: of a page in this server.
        check: raises if there is no room for a session.
    """

    def __init__(
        self,
        directory: SnapshotDirectory,
        environment: SessionEnvironment,
        page_parts: Sequence[PagePart],
        check: Callable[[Session], None],
    ) -> None:
        self._directory = directory
        self._environment = environment
        self._page_parts = page_parts
        self._check = check

    def restore(self, request: TurnRequest, newest_epoch: int, is_wanted: Callable[[], bool]) -> RestoredSession | None:
        """Claims the session that a START asks for.

        Args:
            request: the START.
            newest_epoch: the newest epoch of the session that is known here.
            is_wanted: whether a client still waits for it.

        Returns:
            The session; None if none is saved or no client waits any more.

        Raises:
            PermissionDenied: it belongs to another client; only the header was read.
            MicroturnError: it cannot be restored for another reason.
        """
        session_id = request.session_id
        header = self._directory.find_header(session_id) if is_wanted() else None
        if header is None:
            return None
        if self._directory.is_expired(header):
            self._directory.remove(session_id)
            if is_owner(header, request):
                raise Expired(f"session '{session_id}' was saved too long ago: open a new one with START")
            return None
        check_owner(header, request)
        check_up_to_date(header, newest_epoch)
        check_model(header, self._environment)
        snapshot = self._directory.find(session_id)
        if snapshot is None:
            return None
        check_owner(snapshot.header, request)  # it may have been saved again in the meantime
        session = restore_session(snapshot, self._environment)
        self._check(session)
        if not is_wanted():
            return None
        taken = restored_session(session, snapshot, self._directory.claim(snapshot), self._page_parts)
        if not is_wanted():
            self.put_back(taken)
            return None
        return taken

    def put_back(self, taken: RestoredSession) -> None:
        """Undoes a claim, so that the session can be restored again."""
        self._directory.put_back(taken.session.id)


def check_up_to_date(header: Header, newest_epoch: int) -> None:
    """Checks that a copy is the newest known one.

    Raises:
        FailedPrecondition: it is not.
    """
    if header.epoch <= newest_epoch:
        raise FailedPrecondition(f"this copy of session '{header.session_id}' is out of date: it went on since")


def restored_session(
    session: Session, snapshot: Snapshot, path: Path, page_parts: Sequence[PagePart]
) -> RestoredSession:
    """The session of a claimed snapshot, with its KV if that can be used."""
    part, kv = snapshot.kv, None
    if part is not None:
        trouble = "its first pages are missing" if part.num_before else trouble_with(part, session, page_parts)
        try:
            kv = ClaimedKV(path, part) if trouble is None else None
        except OSError as error:
            trouble = str(error)
        if trouble is not None:
            log.warning("the KV of session %s is recomputed: %s", session.id, trouble)
    return RestoredSession(session, kv, path)


def trouble_with(part: KVPart, session: Session, page_parts: Sequence[PagePart]) -> str | None:
    """The reason why KV from elsewhere cannot be used for a session here; None if it can.

    Args:
        part: says what it is.
        session: as restored.
        page_parts: of a page here.
    """
    if not part.is_of(page_parts):
        return "it was saved with another kv_dtype or page_size"
    is_of_table = part.state.cut(0) == session.table.save()
    if not is_of_table or not 0 < part.state.kv_len < len(session.context):
        return "it is not that of the session's tokens"
    return None
