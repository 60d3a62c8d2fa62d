"""Reads a saved session for a START and claims it. Runs on a background thread: accesses files, but no live session.

header ──▶ owner, epoch, model ──▶ content, checksum ──▶ session ──▶ claimed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from microturn.errors import Expired, FailedPrecondition
from microturn.kv.image import PagePart
from microturn.kv.table_state import TableState
from microturn.offload.incoming import KVSource
from microturn.sessions.environment import SessionEnvironment, next_epoch
from microturn.sessions.ownership import check_owner, is_owner
from microturn.sessions.session import Session
from microturn.sessions.turn import TurnRequest
from microturn.snapshots.claimed_kv import ClaimedFile, ClaimedKV
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.kv_files import KVFiles
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
        claimed: its claimed snapshot; None of one that another server has sent.
    """

    session: Session
    kv: KVSource | None
    claimed: ClaimedFile | None = None

    def drop_content(self) -> None:
        """Cuts the snapshot to its header, unless KV is still to be read from it."""
        if self.kv is None and self.claimed is not None:
            self.claimed.drop_content()


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
        # Whatever else lives of it, where it was before, is older from now on.
        session.epoch = next_epoch(session.epoch)
        return taken

    def put_back(self, taken: RestoredSession) -> None:
        """Undoes a claim, so that the session can be restored again."""
        self._directory.put_back(taken.session.id)


def check_up_to_date(header: Header, newest_epoch: int, epoch: int | None = None) -> None:
    """Checks that a copy is the newest known one.

    Args:
        header: of the copy.
        newest_epoch: of those that are known here.
        epoch: that counts for it, where it is not the header's.

    Raises:
        FailedPrecondition: it is not.
    """
    if (header.epoch if epoch is None else epoch) <= newest_epoch:
        raise FailedPrecondition(f"this copy of session '{header.session_id}' is out of date: it went on since")


def restored_session(
    session: Session, snapshot: Snapshot, claimed: ClaimedFile, page_parts: Sequence[PagePart]
) -> RestoredSession:
    """The session of a claimed snapshot, with its KV if that can be used."""
    try:
        kv = _kv_of(session, snapshot, claimed, page_parts)
    except (ValueError, TypeError, LookupError) as error:
        log.warning("the KV of session %s is recomputed: %s", session.id, error)
        kv = None
    return RestoredSession(session, kv, claimed)


def _kv_of(
    session: Session, snapshot: Snapshot, claimed: ClaimedFile, page_parts: Sequence[PagePart]
) -> KVSource | None:
    """The KV of a claimed snapshot, or of the files beside it; None if there is none.

    Raises:
        ValueError, TypeError, LookupError: it cannot be used here.
    """
    files, part = KVFiles.of_state(snapshot.state), snapshot.kv
    if files is not None:
        check_table(files.state, session)
        return claimed.kv_files(files)
    if part is None:
        return None
    if part.num_before:
        raise ValueError("its first pages are missing")
    check_kv(part, session, page_parts)
    return ClaimedKV(claimed, part)


def check_kv(part: KVPart, session: Session, page_parts: Sequence[PagePart]) -> None:
    """Checks that KV from elsewhere can be used for a session here.

    Args:
        part: says what it is.
        session: as restored.
        page_parts: of a page here.

    Raises:
        ValueError: it cannot.
    """
    if not part.is_of(page_parts):
        raise ValueError("it was saved with another kv_dtype or page_size, or other scales")
    check_table(part.state, session)


def check_table(state: TableState, session: Session) -> None:
    """Checks that a table is one of a session; raises ValueError."""
    if state.cut(0) != session.table.save() or not 0 < state.kv_len < len(session.context):
        raise ValueError("it is not that of the session's tokens")
