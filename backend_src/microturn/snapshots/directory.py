"""A directory of snapshots: one file per session, found by its id, which can be claimed once.

    <digest of the id>.snapshot     can be restored
    <digest of the id>.claimed      was restored: its header, with the epoch that a copy must exceed, and its KV until
                                    that is read
    <digest of the id>.damaged      could not be read; kept for inspection
    <digest of the id>.kv/          the KV of a session that was saved while it goes on: see `kv_files`

Several servers may share a directory: a rename decides which server gets a session.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from microturn.errors import FailedPrecondition, InternalError, InvalidArgument, NotFound
from microturn.offload.copies import KVCopy
from microturn.sessions.turn import SessionId
from microturn.snapshots.file import (
    NewerSnapshot,
    UnreadableSnapshot,
    claim,
    read_header,
    read_snapshot,
    write_snapshot,
)
from microturn.snapshots.kv_files import KVFiles, write_kv_file
from microturn.snapshots.snapshot import Header, Snapshot

log = logging.getLogger(__name__)

Found = TypeVar("Found")

_SAVED, _CLAIMED, _DAMAGED = ".snapshot", ".claimed", ".damaged"
KV_SUFFIX = ".kv"


class SnapshotDirectory:
    """A directory of snapshots, created if missing.

    Args:
        path: the directory.
        ttl_s: how long a snapshot can be restored.
        now: seconds since 1970.

    Raises:
        InvalidArgument: it cannot be used.
    """

    def __init__(self, path: Path, *, ttl_s: float, now: Callable[[], float] = time.time) -> None:
        self.ttl_s = ttl_s
        self._path = path
        self._now = now
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"snapshot_dir cannot be made: {error.strerror}: {path}") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise InvalidArgument(f"snapshot_dir is not ours to write: {path}")

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
            kv: its KV; None to leave it out.
            until_s: deadline of writing KV, by `time.monotonic`.

        Raises:
            ResourceExhausted, DeadlineExceeded, FailedPrecondition: as `write_snapshot`.
        """
        write_snapshot(self._file_of(snapshot.header.session_id, _SAVED), snapshot, kv, until_s=until_s)
        self._remove_kv(snapshot.header.session_id)

    def save_next(self, snapshot: Snapshot, kv: KVCopy | None, before: KVFiles | None) -> KVFiles | None:
        """Saves a session that goes on, replacing the copy that was saved last.

        Args:
            snapshot: of the session.
            kv: its KV, without the pages that `before` has; None to leave it out.
            before: files with its first pages; None if there are none.

        Returns:
            The files with its KV.

        Raises:
            ResourceExhausted, FailedPrecondition: as `write_snapshot`; the last copy can be restored.
        """
        session_id, files = snapshot.header.session_id, None
        if self._epoch_in(self._file_of(session_id, _SAVED)) >= snapshot.header.epoch:
            raise FailedPrecondition(f"a newer copy of session '{session_id}' has been saved by another server")
        if kv is not None:
            name = str(snapshot.header.epoch)
            kept = () if before is None else before.cut(kv.num_before)
            directory = self._file_of(session_id, KV_SUFFIX)
            if not all((directory / one).exists() for one, _ in kept):
                raise FailedPrecondition(f"files with the KV of session '{session_id}' have been removed")
            write_kv_file(directory, name, kv)
            files = KVFiles(kv.state, (*kept, (name, kv.pages.num_pages)))
            snapshot = replace(snapshot, state={**snapshot.state, **files.as_entry()})
        write_snapshot(self._file_of(session_id, _SAVED), snapshot)
        self._remove_kv(session_id, but=() if files is None else [name for name, _ in files.files])
        return files

    def add_kv(self, snapshot: Snapshot, kv: KVCopy, *, until_s: float = math.inf) -> bool:
        """Saves a session again, with its KV.

        Args:
            snapshot: as it was saved.
            kv: its KV.
            until_s: deadline by `time.monotonic`.

        Returns:
            False if the session was claimed meanwhile; then nothing is saved.

        Raises:
            ResourceExhausted, DeadlineExceeded, FailedPrecondition: as `write_snapshot`; nothing is changed.
        """
        file = self._file_of(snapshot.header.session_id, _SAVED)
        if not file.exists():
            return False
        write_snapshot(file, snapshot, kv, until_s=until_s)
        return True

    def find_header(self, session_id: SessionId) -> Header | None:
        """The header of a session's snapshot, if there is one; nothing else is read.

        Raises:
            InternalError: as `find`.
        """
        return self._read(session_id, lambda file: (header := read_header(file), header))

    def find(self, session_id: SessionId) -> Snapshot | None:
        """The snapshot of a session, if there is one.

        Raises:
            InternalError: it is damaged and was renamed, or it cannot be read at present.
            FailedPrecondition: a newer version wrote it.
        """

        def read(file: Path) -> tuple[Header, Snapshot]:
            snapshot = read_snapshot(file)
            return snapshot.header, snapshot

        return self._read(session_id, read)

    def _read(self, session_id: SessionId, read: Callable[[Path], tuple[Header, Found]]) -> Found | None:
        file = self._file_of(session_id, _SAVED)
        try:
            header, found = read(file)
            if header.session_id != session_id:
                raise UnreadableSnapshot(f"it is of session '{header.session_id}'")
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("session %s cannot be restored now: %s", session_id, error)
            raise InternalError(f"session '{session_id}' was saved, and cannot be read now: try again") from error
        except NewerSnapshot as error:
            log.error("session %s cannot be restored from %s: %s", session_id, file, error)
            raise FailedPrecondition(
                f"session '{session_id}' was saved by a newer version of the server: go on where that version runs"
            ) from error
        except UnreadableSnapshot as error:
            log.error("session %s cannot be restored from %s: %s", session_id, file, error)
            file.rename(self._file_of(session_id, _DAMAGED))
            raise InternalError(f"session '{session_id}' was saved, but its file is damaged: open a new one") from error
        return found

    def claim(self, snapshot: Snapshot) -> Path:
        """Claims a snapshot by renaming it, so that it is restored once, and returns its new path.

        Raises:
            FailedPrecondition: it is an old copy of a session that was restored already.
            NotFound: another server has just claimed it.
        """
        session_id, claimed = snapshot.header.session_id, self._file_of(snapshot.header.session_id, _CLAIMED)
        if snapshot.header.epoch <= self._epoch_in(claimed):
            raise FailedPrecondition(
                f"this copy of session '{session_id}' is out of date, a newer one was restored: open a new session"
            )
        if not claim(self._file_of(session_id, _SAVED), claimed):
            raise NotFound(f"session '{session_id}' was restored elsewhere: open a new one with START")
        return claimed

    def put_back(self, session_id: SessionId) -> None:
        """Undoes a claim, unless the session has been saved again since."""
        file = self._file_of(session_id, _SAVED)
        if not file.exists():
            claim(self._file_of(session_id, _CLAIMED), file)

    def purge(self) -> None:
        """Removes expired files, including partly written ones.

        Raises:
            OSError: the directory cannot be read.
        """
        for file in self._path.iterdir():
            is_unfinished = file.name.startswith(".") and f"{_SAVED}." in file.name
            if file.suffix == KV_SUFFIX:
                self._purge_kv(file)
                continue
            if file.suffix not in (_SAVED, _CLAIMED, _DAMAGED) and not is_unfinished:
                continue
            try:
                self._purge(file)
            except FileNotFoundError:
                continue  # another server was faster
            except OSError as error:
                log.error("cannot check whether %s has expired: %s", file, error)

    def remove(self, session_id: SessionId, up_to: float = math.inf) -> None:
        """Removes the snapshot of a session, unless it is of a later epoch than `up_to`."""
        file = self._file_of(session_id, _SAVED)
        if self._epoch_in(file) <= up_to:
            file.unlink(missing_ok=True)
            self._remove_kv(session_id)

    def _remove_kv(self, session_id: SessionId, but: Container[str] = ()) -> None:
        """Removes a session's KV in files of its own, other than those named."""
        directory = self._file_of(session_id, KV_SUFFIX)
        with suppress(OSError):  # there is none; or it is removed when it is old enough
            for file in list(directory.iterdir()):
                if file.name not in but:
                    file.unlink(missing_ok=True)
            if not but:
                directory.rmdir()

    def _purge(self, file: Path) -> None:
        found = file.stat()
        try:
            expires_s = read_header(file).expires_s
        except UnreadableSnapshot:
            expires_s = found.st_mtime + self.ttl_s
        # Meanwhile the session may have been saved again under the same name.
        if expires_s <= self._now() and file.stat().st_ino == found.st_ino:
            file.unlink(missing_ok=True)

    def _purge_kv(self, directory: Path) -> None:
        """Removes KV to which nothing was added for so long that no snapshot of it can be restored."""
        with suppress(FileNotFoundError):
            if directory.stat().st_mtime + 2 * self.ttl_s <= self._now():
                shutil.rmtree(directory, ignore_errors=True)

    def _file_of(self, session_id: SessionId, suffix: str) -> Path:
        # As JSON, 5 and "5" are different ids; as a digest any id is a valid file name.
        name = hashlib.blake2b(json.dumps(session_id).encode(), digest_size=16).hexdigest()
        return self._path / f"{name}{suffix}"

    def _epoch_in(self, file: Path) -> int:
        """The epoch of a snapshot; 0 where there is none."""
        try:
            return read_header(file).epoch
        except FileNotFoundError:
            return 0
        except UnreadableSnapshot as error:
            log.warning("%s is damaged and cannot exclude older copies: %s", file, error)
            return 0
