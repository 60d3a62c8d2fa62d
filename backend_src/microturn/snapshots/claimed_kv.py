"""The KV of a restored session in its claimed snapshot."""

from __future__ import annotations

import logging
from pathlib import Path

from microturn.kv.image import KVImage
from microturn.kv.page_table import TableState
from microturn.offload.image_file import read_tensors
from microturn.snapshots.file import keep_header
from microturn.snapshots.kv_part import KVPart

log = logging.getLogger(__name__)

# Device and inode.
FileId = tuple[int, int]


class ClaimedKV:
    """A `KVSource`: KV in a claimed snapshot, until it is read or dropped.

    Args:
        path: of the snapshot.
        part: its description of the KV.

    Raises:
        OSError: it no longer exists.
    """

    def __init__(self, path: Path, part: KVPart) -> None:
        self._path = path
        self._part = part
        # Another server may save and claim the session again: then the file of this name is another one.
        self._file_id = _id_of(path)

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
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._part.start)
            read_tensors(file, pages, self._part.checksum)

    def drop(self) -> None:
        drop_content(self._path, self._file_id)


def drop_content(path: Path, file_id: FileId | None = None) -> None:
    """Truncates a claimed snapshot to its header, if it is still the file with this id; errors are only logged."""
    try:
        if file_id is None or _id_of(path) == file_id:
            keep_header(path)
    except OSError as error:
        log.warning("%s keeps its content until it expires: %s", path, error)


def _id_of(path: Path) -> FileId:
    found = path.stat()
    return found.st_dev, found.st_ino
