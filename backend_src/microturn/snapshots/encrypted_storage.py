"""A storage whose files are encrypted: around one that keeps them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

from microturn.snapshots.encrypted_file import EncryptedFile, Secret, encrypted, sealed_bytes
from microturn.snapshots.storage import Content, Listed, OpenFile, Storage


class EncryptedStorage:
    """A `Storage`.

    Args:
        storage: keeps the encrypted files.
        secret: that all servers share.
    """

    def __init__(self, storage: Storage, secret: Secret) -> None:
        self._storage = storage
        self._secret = secret

    def place_of(self, name: str) -> str:
        return self._storage.place_of(name)

    def write(self, name: str, content: Content) -> None:
        self._storage.write(name, encrypted(content, self._secret, _lasting(name)))

    def open(self, name: str) -> OpenFile:
        file = self._storage.open(name)
        try:
            return EncryptedFile(file, self._secret, _lasting(name))
        except BaseException as error:
            file.__exit__(type(error), error, error.__traceback__)
            raise

    def id_of(self, name: str) -> Hashable | None:
        return self._storage.id_of(name)

    def move(self, name: str, to: str) -> bool:
        return self._storage.move(name, to)

    def cut(self, name: str, file_id: Hashable, num_bytes: int) -> None:
        self._storage.cut(name, file_id, sealed_bytes(num_bytes))

    def remove(self, name: str, file_id: Hashable | None = None) -> None:
        self._storage.remove(name, file_id)

    def names_in(self, folder: str) -> Collection[str]:
        return self._storage.names_in(folder)

    def keep_only(self, folder: str, names: Collection[str] = ()) -> None:
        self._storage.keep_only(folder, names)

    def files(self) -> Iterable[Listed]:
        return self._storage.files()


def _lasting(name: str) -> str:
    """The part of a file's name that stays when the file is moved, or left unfinished."""
    return name if "/" in name else name.removeprefix(".").partition(".")[0]
