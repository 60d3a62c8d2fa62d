"""A directory of snapshots, in any storage: one file per session, found by its id, which can be claimed once.

    <digest of the id>.snapshot     can be restored
    <digest of the id>.claimed      was restored: its header, with the epoch that a copy must exceed, and its KV until
                                    that is read
    <digest of the id>.damaged      could not be read; kept for inspection
    <digest of the id>.kv/          the KV of a session that was saved while it goes on: see `kv_files`

Several servers may share a directory: `Storage.move` decides which server gets a session.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TypeVar

from microturn.errors import FailedPrecondition, InternalError, NotFound, Unavailable
from microturn.offload.copies import KVCopy
from microturn.offload.image_file import DamagedFile
from microturn.sessions.turn import SessionId
from microturn.snapshots.claimed_kv import ClaimedFile
from microturn.snapshots.file import NewerSnapshot, UnreadableSnapshot, content_of, read_from, read_header, write
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.kv_files import KV_SUFFIX, KVFiles, kv_content
from microturn.snapshots.snapshot import Header, Snapshot
from microturn.snapshots.storage import Listed, OpenFile, Storage

log = logging.getLogger(__name__)

Found = TypeVar("Found")

_SUFFIXES = _SAVED, _CLAIMED, _DAMAGED = ".snapshot", ".claimed", ".damaged"


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
            kv: its KV; None to leave it out.
            until_s: deadline of writing KV, by `time.monotonic`.

        Raises:
            ResourceExhausted, DeadlineExceeded, Unavailable, FailedPrecondition: as `file.write`.
        """
        self._write(snapshot, kv, until_s)
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
            ResourceExhausted, FailedPrecondition: as `file.write`; the last copy can be restored, or this one.
        """
        session_id, files = snapshot.header.session_id, None
        if self._epoch_in(_name_of(session_id, _SAVED)) >= snapshot.header.epoch:
            raise FailedPrecondition(f"a newer copy of session '{session_id}' has been saved by another server")
        if kv is not None:
            name = str(snapshot.header.epoch)
            kept = () if before is None else before.cut(kv.num_before)
            folder = _name_of(session_id, KV_SUFFIX)
            if kept and not {one for one, _ in kept} <= set(self._storage.names_in(folder)):
                raise FailedPrecondition(f"files with the KV of session '{session_id}' have been removed")
            write(self._storage, f"{folder}/{name}", kv_content(kv))
            files = KVFiles(kv.state, (*kept, (name, kv.pages.num_pages)))
            snapshot = replace(snapshot, state={**snapshot.state, **files.as_entry()})
        try:
            self._write(snapshot)
        except Unavailable as error:  # the session goes on here either way
            raise FailedPrecondition(error.args[0]) from error
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
            ResourceExhausted, DeadlineExceeded, FailedPrecondition: as `file.write`; nothing is changed.
        """
        name = _name_of(snapshot.header.session_id, _SAVED)
        try:
            if self._storage.id_of(name) is None:
                return False
        except OSError as error:
            raise FailedPrecondition(f"cannot look for {self._storage.place_of(name)}: {error.strerror}") from error
        self._write(snapshot, kv, until_s)
        return True

    def _write(self, snapshot: Snapshot, kv: KVCopy | None = None, until_s: float = math.inf) -> None:
        name = _name_of(snapshot.header.session_id, _SAVED)
        write(self._storage, name, content_of(snapshot, kv, until_s=until_s))

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

        def read(file: OpenFile) -> tuple[Header, Snapshot]:
            snapshot = read_from(file, file.num_bytes)
            return snapshot.header, snapshot

        return self._read(session_id, read)

    def _read(self, session_id: SessionId, read: Callable[[OpenFile], tuple[Header, Found]]) -> Found | None:
        name = _name_of(session_id, _SAVED)
        try:
            with self._storage.open(name) as file:
                header, found = read(file)
            if header.session_id != session_id:
                raise UnreadableSnapshot(f"it is of session '{header.session_id}'")
        except FileNotFoundError:
            return None
        except OSError as error:
            log.error("session %s cannot be restored now: %s", session_id, error)
            raise InternalError(f"session '{session_id}' was saved, and cannot be read now: try again") from error
        except NewerSnapshot as error:
            log.error("session %s cannot be restored from %s: %s", session_id, self._storage.place_of(name), error)
            raise FailedPrecondition(
                f"session '{session_id}' was saved by a newer version of the server: go on where that version runs"
            ) from error
        except DamagedFile as error:
            log.error("session %s cannot be restored from %s: %s", session_id, self._storage.place_of(name), error)
            self._storage.move(name, _name_of(session_id, _DAMAGED))
            raise InternalError(f"session '{session_id}' was saved, but its file is damaged: open a new one") from error
        return found

    def claim(self, snapshot: Snapshot) -> ClaimedFile:
        """Claims a snapshot, so that it is restored once.

        Raises:
            FailedPrecondition: it is an old copy of a session that was restored already.
            NotFound: another server has just claimed it.
            InternalError: the storage fails.
        """
        session_id, claimed = snapshot.header.session_id, _name_of(snapshot.header.session_id, _CLAIMED)
        try:
            if snapshot.header.epoch <= self._epoch_in(claimed):
                raise FailedPrecondition(
                    f"this copy of session '{session_id}' is out of date, a newer one was restored: open a new session"
                )
            is_ours = self._storage.move(_name_of(session_id, _SAVED), claimed)
        except OSError as error:
            log.error("session %s cannot be claimed now: %s", session_id, error)
            raise InternalError(f"session '{session_id}' was saved, and cannot be claimed now: try again") from error
        if not is_ours:
            raise NotFound(f"session '{session_id}' was restored elsewhere: open a new one with START")
        return ClaimedFile(self._storage, claimed)

    def put_back(self, session_id: SessionId) -> None:
        """Undoes a claim, unless the session has been saved again since; errors are only logged."""
        name = _name_of(session_id, _SAVED)
        try:
            if self._storage.id_of(name) is None:
                self._storage.move(_name_of(session_id, _CLAIMED), name)
        except OSError as error:
            log.error("session %s is lost: %s", session_id, error)

    def purge(self) -> None:
        """Removes expired files, including partly written ones.

        Raises:
            OSError: the directory cannot be read.
        """
        for listed in self._storage.files():
            suffix = PurePath(listed.name).suffix
            is_unfinished = listed.name.startswith(".") and any(f"{one}." in listed.name for one in _SUFFIXES)
            try:
                # No snapshot can be restored to whose KV nothing was added for so long.
                if suffix == KV_SUFFIX and listed.written_s + 2 * self.ttl_s <= self._now():
                    self._storage.keep_only(listed.name)
                elif suffix in _SUFFIXES or is_unfinished:
                    self._purge(listed)
            except FileNotFoundError:
                continue  # another server was faster
            except OSError as error:
                log.error("cannot check whether %s has expired: %s", self._storage.place_of(listed.name), error)

    def remove(self, session_id: SessionId, up_to: float = math.inf) -> None:
        """Removes the snapshot of a session, unless it is of a later epoch than `up_to`."""
        name = _name_of(session_id, _SAVED)
        file_id = self._storage.id_of(name)
        if self._epoch_in(name) > up_to:
            return
        if file_id is not None:  # it may be saved again meanwhile
            self._storage.remove(name, file_id)
        self._remove_kv(session_id)

    def _remove_kv(self, session_id: SessionId, but: Collection[str] = ()) -> None:
        """Removes a session's KV in files of its own, other than those named."""
        with suppress(OSError):  # it is removed when it is old enough
            self._storage.keep_only(_name_of(session_id, KV_SUFFIX), but)

    def _purge(self, listed: Listed) -> None:
        file_id = self._storage.id_of(listed.name)
        try:
            with self._storage.open(listed.name) as file:
                expires_s = read_header(file).expires_s
        except DamagedFile:
            expires_s = listed.written_s + self.ttl_s
        # Meanwhile the session may have been saved again under the same name.
        if file_id is not None and expires_s <= self._now():
            self._storage.remove(listed.name, file_id)

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


def _name_of(session_id: SessionId, suffix: str) -> str:
    # As JSON, 5 and "5" are different ids; as a digest any id is a valid name, and the name does not tell it.
    return hashlib.blake2b(json.dumps(session_id).encode(), digest_size=16).hexdigest() + suffix
