"""A directory of snapshots, in any storage: one file per session, found by its id, which can be claimed once.

Several servers may share a directory: `Storage.move` decides which server gets a session.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from microturn.errors import DeadlineExceeded, FailedPrecondition, InternalError, NotFound, Unavailable
from microturn.offload.copies import KVCopy
from microturn.offload.image_file import DamagedFile
from microturn.sessions.turn import SessionId
from microturn.snapshots.claimed_kv import ClaimedFile
from microturn.snapshots.file import NewerSnapshot, UnreadableSnapshot, content_of, read_from, read_header, write
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.kv_files import KVFiles, kv_content
from microturn.snapshots.names import CLAIMED, DAMAGED, KV, SAVED, name_of
from microturn.snapshots.purging import purge
from microturn.snapshots.snapshot import Header, Snapshot
from microturn.snapshots.storage import OpenFile, Storage

log = logging.getLogger(__name__)

Found = TypeVar("Found")


class TakenUp(FailedPrecondition):
    """A session goes on at another server."""


class SnapshotDirectory:
    """A directory of snapshots.

    Args:
        place: keeps the files; a path is that of a directory, which is made if it is missing.
        ttl_s: how long a snapshot can be restored.
        now: seconds since 1970.

    Raises:
        InvalidArgument: it cannot be used.
    """

    def __init__(self, place: Storage | Path, *, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self.ttl_s = ttl_s
        self._storage: Storage = FileStorage.made(place) if isinstance(place, Path) else place
        self._now = now

    @property
    def expires_s(self) -> float:
        """The expiry time of a snapshot that is saved now, in seconds since 1970."""
        return self._now() + self.ttl_s

    def is_expired(self, header: Header) -> bool:
        """Whether a snapshot has expired."""
        return header.expires_s <= self._now()

    def save(self, snapshot: Snapshot, kv: KVCopy | None = None, *, until_s: float = math.inf) -> None:
        """Saves a session, replacing an older copy.

        Args:
            snapshot: of the session.
            kv: its KV; None to leave it out. What is in files of its own stays then: it may be read yet, for `add_kv`.
            until_s: deadline of writing KV, by `time.monotonic`.

        Raises:
            TakenUp: another server has taken it up, or has saved a newer copy.
            ResourceExhausted, DeadlineExceeded, Unavailable, FailedPrecondition: as `file.write`.
        """
        self._check_newest(snapshot)
        self._write(snapshot, kv, until_s)
        if kv is not None:
            self._keep_kv(snapshot.header.session_id)

    def save_next(
        self, snapshot: Snapshot, kv: KVCopy | None, before: KVFiles | None, is_wanted: Callable[[], bool]
    ) -> KVFiles | None:
        """Saves a session that goes on, replacing the copy that was saved last.

        Args:
            snapshot: of the session. KV in files up to its base epoch may be unread: it stays.
            kv: its KV, without the pages that `before` has; None to leave it out.
            before: files with its first pages; None if there are none.
            is_wanted: whether there is time still; asked between two pieces.

        Returns:
            The files with its KV.

        Raises:
            TakenUp: another server has taken it up meanwhile, or has saved a newer copy.
            ResourceExhausted, FailedPrecondition: as `file.write`; the last copy can be restored, or this one.
            DeadlineExceeded: there is no time any more.
            OSError: the storage cannot say what it has.
        """
        session_id, files = snapshot.header.session_id, None
        folder = name_of(session_id, KV)
        names = set(self._storage.names_in(folder))
        if kv is not None:
            name = str(snapshot.header.epoch)
            kept = () if before is None else before.cut(kv.num_before)
            if not {one for one, _ in kept} <= names:
                self._check_newest(snapshot)
                raise FailedPrecondition(f"files with the KV of session '{session_id}' have been removed")
            write(self._storage, f"{folder}/{name}", kv_content(kv, is_wanted))
            files = KVFiles(kv.state, (*kept, (name, kv.pages.num_pages)))
            snapshot = replace(snapshot, state={**snapshot.state, **files.as_entry()})
        # Only now: writing KV takes time, in which it may be taken up.
        try:
            self._check_newest(snapshot)
        except TakenUp:
            with suppress(OSError):  # it is removed when it is old enough
                self._storage.remove(f"{folder}/{snapshot.header.epoch}")
            raise
        if not is_wanted():
            raise DeadlineExceeded(f"there is no time to save session '{session_id}'")
        try:
            self._write(snapshot)
        except Unavailable as error:  # the session goes on here either way
            raise FailedPrecondition(error.args[0]) from error
        named = () if files is None else files.files
        unread = (one for one in names if one.isdecimal() and int(one) <= snapshot.base_epoch)
        self._keep_kv(session_id, {*unread, *(one for one, _ in named)})
        return files

    def add_kv(self, snapshot: Snapshot, kv: KVCopy, *, until_s: float = math.inf) -> bool:
        """Saves a session again, with its KV.

        Args:
            snapshot: as it was saved.
            kv: its KV.
            until_s: deadline by `time.monotonic`.

        Returns:
            False if it has been taken up meanwhile; then nothing is saved.

        Raises:
            ResourceExhausted, DeadlineExceeded, FailedPrecondition: as `file.write`; nothing is changed.
        """
        name = name_of(snapshot.header.session_id, SAVED)
        try:
            if self._epoch_in(name) != snapshot.header.epoch:
                return False
        except OSError as error:
            raise FailedPrecondition(f"cannot look for {self._storage.place_of(name)}: {error.strerror}") from error
        self._write(snapshot, kv, until_s)
        self._keep_kv(snapshot.header.session_id)
        return True

    def _write(self, snapshot: Snapshot, kv: KVCopy | None = None, until_s: float = math.inf) -> None:
        name = name_of(snapshot.header.session_id, SAVED)
        write(self._storage, name, content_of(snapshot, kv, until_s=until_s))

    def find_header(self, session_id: SessionId) -> Header | None:
        """The header of a session's snapshot, if there is one; nothing else is read.

        Raises:
            MicroturnError: as `find`.
        """
        return self._read(session_id, lambda file: (header := read_header(file), header))

    def find(self, session_id: SessionId) -> Snapshot | None:
        """The snapshot of a session, if there is one.

        Raises:
            InternalError, Unavailable: it is damaged and was renamed, or it cannot be read at present.
            FailedPrecondition: a newer version wrote it.
        """

        def read(file: OpenFile) -> tuple[Header, Snapshot]:
            snapshot = read_from(file, file.num_bytes)
            return snapshot.header, snapshot

        return self._read(session_id, read)

    def _read(self, session_id: SessionId, read: Callable[[OpenFile], tuple[Header, Found]]) -> Found | None:
        name = name_of(session_id, SAVED)
        try:
            with self._storage.open(name) as file:
                header, found = read(file)
            if header.session_id != session_id:
                raise UnreadableSnapshot(f"it is of session '{header.session_id}'")
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("session %s cannot be restored now: %s", session_id, error)
            message = f"session '{session_id}' was saved, and cannot be read now: try again"
            raise Unavailable(message, retry_after_ms=500) from error
        except NewerSnapshot as error:
            log.error("session %s cannot be restored from %s: %s", session_id, self._storage.place_of(name), error)
            raise FailedPrecondition(
                f"session '{session_id}' was saved by a newer version of the server: go on where that version runs"
            ) from error
        except DamagedFile as error:
            log.error("session %s cannot be restored from %s: %s", session_id, self._storage.place_of(name), error)
            with suppress(OSError):
                self._storage.move(name, name_of(session_id, DAMAGED))
            raise InternalError(f"session '{session_id}' was saved, but its file is damaged: open a new one") from error
        return found

    def claim(self, snapshot: Snapshot) -> ClaimedFile:
        """Claims a snapshot, so that it is restored once.

        Raises:
            FailedPrecondition: it is an old copy of a session that was restored already.
            NotFound: another server has just claimed it.
            Unavailable: the storage fails.
        """
        session_id, claimed = snapshot.header.session_id, name_of(snapshot.header.session_id, CLAIMED)
        try:
            if snapshot.header.epoch <= self._epoch_in(claimed):
                raise FailedPrecondition(
                    f"this copy of session '{session_id}' is out of date, a newer one was restored: open a new session"
                )
            is_ours = self._storage.move(name_of(session_id, SAVED), claimed)
        except OSError as error:
            log.error("session %s cannot be claimed now: %s", session_id, error)
            message = f"session '{session_id}' was saved, and cannot be claimed now: try again"
            raise Unavailable(message, retry_after_ms=500) from error
        if not is_ours:
            raise NotFound(f"session '{session_id}' was restored elsewhere: open a new one with START")
        return ClaimedFile(self._storage, claimed)

    def put_back(self, session_id: SessionId) -> None:
        """Undoes a claim, unless the session has been saved again since; errors are only logged."""
        name = name_of(session_id, SAVED)
        try:
            if self._storage.id_of(name) is None:
                self._storage.move(name_of(session_id, CLAIMED), name)
        except OSError as error:
            log.error("session %s is lost: %s", session_id, error)

    def purge(self) -> None:
        """Removes expired files, including partly written ones.

        Raises:
            OSError: the directory cannot be read.
        """
        purge(self._storage, ttl_s=self.ttl_s, now_s=self._now())

    def remove(self, session_id: SessionId, up_to: float = math.inf) -> None:
        """Removes what is saved of a session, unless it is of a later epoch than `up_to`."""
        name = name_of(session_id, SAVED)
        file_id = self._storage.id_of(name)
        if self._epoch_in(name) > up_to:
            return
        if file_id is not None:  # it may be saved again meanwhile
            self._storage.remove(name, file_id)
        self._keep_kv(session_id)

    def remove_ended(self, session_id: SessionId, epoch: int, base_epoch: int) -> None:
        """Removes what is saved of a session that has ended, unless it goes on elsewhere.

        Args:
            session_id: of the session.
            epoch: that it had at last.
            base_epoch: that it had when it came to this server.

        Raises:
            OSError: it cannot be removed now.
        """
        if not self._is_taken_up(session_id, base_epoch):
            self.remove(session_id, up_to=epoch)

    def _check_newest(self, snapshot: Snapshot) -> None:
        session_id, epoch = snapshot.header.session_id, snapshot.header.epoch
        try:
            has_newer = self._epoch_in(name_of(session_id, SAVED)) >= epoch
            has_newer = has_newer or self._is_taken_up(session_id, snapshot.base_epoch)
        except OSError as error:
            raise FailedPrecondition(f"it cannot be read who has session '{session_id}': {error.strerror}") from error
        if has_newer:
            raise TakenUp(f"session '{session_id}' has been taken up by another server")

    def _is_taken_up(self, session_id: SessionId, base_epoch: int) -> bool:
        # What this server has claimed is of the epoch with which the session came here.
        return self._epoch_in(name_of(session_id, CLAIMED)) > base_epoch

    def _keep_kv(self, session_id: SessionId, names: Collection[str] = ()) -> None:
        """Removes a session's KV in files of its own, other than those named."""
        with suppress(OSError):  # it is removed when it is old enough
            self._storage.keep_only(name_of(session_id, KV), names)

    def _epoch_in(self, name: str) -> int:
        """The epoch of a snapshot; 0 where there is none."""
        try:
            with self._storage.open(name) as file:
                return read_header(file).epoch
        except FileNotFoundError:
            return 0
        except DamagedFile as error:
            log.warning("%s is damaged and cannot exclude older copies: %s", self._storage.place_of(name), error)
            return 0
