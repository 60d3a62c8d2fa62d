"""The KV of a restored session in its claimed snapshot."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from contextlib import suppress

from microturn.kv.image import KVImage
from microturn.kv.table_state import TableState
from microturn.offload.image_file import LENGTH_BYTES, DamagedFile, read_tensors
from microturn.snapshots.kv_files import FiledKV, KVFiles
from microturn.snapshots.kv_part import KVPart
from microturn.snapshots.names import kv_folder
from microturn.snapshots.storage import OpenFile, Storage

log = logging.getLogger(__name__)


class ClaimedFile:
    """A claimed snapshot, as long as it is the one that was claimed.

    Args:
        storage: where it is.
        name: of the file. Another server may save and claim the session again: then it is another one's.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._file_id: Hashable | None = None
        with suppress(OSError):  # the session is ours all the same
            self._file_id = storage.id_of(name)

    def open(self) -> OpenFile:
        """Opens it.

        Raises:
            DamagedFile, OSError: as `Storage.open`.
        """
        return self._storage.open(self._name)

    def kv_files(self, files: KVFiles) -> FiledKV:
        """The session's KV in files of its own."""
        return FiledKV(self._storage, kv_folder(self._name), files)

    def drop_content(self) -> None:
        """Cuts it to its header; errors are only logged."""
        try:
            with self.open() as file:
                head_len = LENGTH_BYTES + int.from_bytes(file.read(LENGTH_BYTES), "little")
            if self._file_id is not None:
                self._storage.cut(self._name, self._file_id, head_len)
        except (OSError, DamagedFile) as error:
            log.warning("%s keeps its content until it expires: %s", self._storage.place_of(self._name), error)


class ClaimedKV:
    """A `KVSource`: KV in a claimed snapshot, until it is read or dropped.

    Args:
        file: the snapshot.
        part: its description of the KV.
    """

    def __init__(self, file: ClaimedFile, part: KVPart) -> None:
        self._file = file
        self._part = part

    @property
    def pages(self) -> None:
        """None: they are in a file."""

    @property
    def state(self) -> TableState:
        return self._part.state

    def read(self, pages: KVImage) -> None:
        """Reads the pages.

        Raises:
            DamagedFile: they differ from what was written.
            OSError: they cannot be read.
        """
        with self._file.open() as file:
            file.seek(self._part.start)
            read_tensors(file, pages, self._part.checksum)

    def drop(self) -> None:
        self._file.drop_content()
