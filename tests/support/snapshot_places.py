"""The storages of snapshots, each with a view of what stands in it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from microturn.snapshots.encrypted_file import Secret
from microturn.snapshots.encrypted_storage import EncryptedStorage
from microturn.snapshots.file_storage import FileStorage
from microturn.snapshots.s3_storage import S3Storage
from microturn.snapshots.storage import Content, Storage
from support.s3_server import BUCKET

KINDS = ["files", "encrypted files", "s3", "encrypted s3"]
SECRET = "sixteen letters!"


@dataclass(frozen=True)
class Place:
    """A place for snapshots.

    Attributes:
        storage: as a server has it.
        raw: with what really stands there.
    """

    storage: Storage
    raw: Storage

    @property
    def names(self) -> list[str]:
        """Of all files and folders."""
        return sorted(listed.name for listed in self.raw.files())

    @property
    def suffixes(self) -> list[str]:
        return [name[name.rindex(".") :] for name in self.names]

    @property
    def kv_names(self) -> list[str]:
        """Of the files in folders, in the order in which they were written."""
        folders = [name for name in self.names if name.endswith(".kv")]
        return sorted(f"{folder}/{name}" for folder in folders for name in self.raw.names_in(folder))

    def get(self, name: str) -> bytes:
        """What stands in a file."""
        with self.raw.open(name) as file:
            return file.read(1 << 30)

    def put(self, name: str, content: bytes) -> None:
        """Writes a file as somebody else would."""
        self.raw.write(name, Content(content, [], len(content)))

    def with_secret(self, text: str | None) -> Storage:
        """The same files as a server with another secret has them."""
        return self.raw if text is None else EncryptedStorage(self.raw, Secret(text))


def make_place(kind: str, directory: Path) -> Place:
    """An empty place of one of `KINDS`.

    Args:
        kind: which.
        directory: for files, made if it is missing.
    """
    prefix = secrets.token_hex(8)
    raw = S3Storage.at(f"s3://{BUCKET}/{prefix}") if kind.endswith("s3") else FileStorage.made(directory)
    return Place(EncryptedStorage(raw, Secret(SECRET)) if kind.startswith("encrypted") else raw, raw)
