"""Snapshots as files in a directory, which servers may share."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Hashable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Self

from microturn.errors import InvalidArgument
from microturn.snapshots.storage import Content, Listed

# Data is synced to disk in pieces of this size, so that deadlines hold: what is in the page cache is not written yet.
_SYNC_BYTES = 16 << 20


class _File:
    """An `OpenFile`, without a buffer."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.readinto = file.readinto
        self.seek = file.seek

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @property
    def file_id(self) -> Hashable:
        return _id(os.fstat(self._file.fileno()))

    def read(self, num_bytes: int, /) -> bytes:
        found = self._file.read(num_bytes)
        # The system reads at most 2 GiB at a time.
        while 0 < len(found) < num_bytes and (more := self._file.read(num_bytes - len(found))):
            found += more
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class FileStorage:
    """A `Storage` in a directory.

    Args:
        path: of the directory, which exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def made(cls, path: Path) -> Self:
        """A storage in a directory that is made if it is missing.

        Raises:
            InvalidArgument: it cannot be used.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"snapshot_dir cannot be made: {error.strerror}: {path}") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise InvalidArgument(f"snapshot_dir is not ours to write: {path}")
        return cls(path)

    def place_of(self, name: str) -> str:
        return str(self._path / name)

    def write(self, name: str, content: Content) -> None:
        path = self._path / name
        if path.parent != self._path:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                num_unsynced = 0
                for piece in content.pieces():
                    num_unsynced += file.write(piece)
                    if num_unsynced >= _SYNC_BYTES:
                        file.flush()
                        os.fdatasync(descriptor)
                        num_unsynced = 0
                file.flush()
                os.fsync(descriptor)
            temporary.rename(path)
            _sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def open(self, name: str) -> _File:
        return _File((self._path / name).open("rb", buffering=0))

    def id_of(self, name: str) -> Hashable | None:
        try:
            return _id((self._path / name).stat())
        except FileNotFoundError:
            return None

    def move(self, name: str, to: str) -> bool:
        try:
            (self._path / name).rename(self._path / to)
        except FileNotFoundError:
            return False
        return True

    def cut(self, name: str, file_id: Hashable, num_bytes: int) -> None:
        with (self._path / name).open("r+b") as file:
            if _id(os.fstat(file.fileno())) == file_id:
                file.truncate(num_bytes)

    def remove(self, name: str, file_id: Hashable | None = None) -> None:
        if file_id is None or self.id_of(name) == file_id:
            (self._path / name).unlink(missing_ok=True)

    def names_in(self, folder: str) -> Collection[str]:
        try:
            return {file.name for file in (self._path / folder).iterdir()}
        except FileNotFoundError:
            return ()

    def keep_only(self, folder: str, names: Collection[str] = ()) -> None:
        path = self._path / folder
        with suppress(FileNotFoundError):
            for file in list(path.iterdir()):
                if file.name not in names:
                    file.unlink(missing_ok=True)
            if not names:
                path.rmdir()

    def files(self) -> Iterator[Listed]:
        for path in self._path.iterdir():
            with suppress(FileNotFoundError):  # another server was faster
                yield Listed(path.name, path.stat().st_mtime)


def _id(found: os.stat_result) -> Hashable:
    return found.st_dev, found.st_ino


def _sync_directory(directory: Path) -> None:
    """Without this a rename may be lost when the machine stops."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
