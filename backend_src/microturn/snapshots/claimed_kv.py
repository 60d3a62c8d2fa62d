"""The KV of a session that was taken up, in the snapshot that it was taken up from."""

from __future__ import annotations

import logging
from pathlib import Path

from microturn.kv_image import KVImage
from microturn.page_table import TableState
from microturn.snapshots.file import keep_header
from microturn.snapshots.kv_part import KVPart
from microturn.tiers.image_file import fill

log = logging.getLogger(__name__)


class ClaimedKV:
    """A `KVSource`: KV in a snapshot that was claimed, until it is read or given up.

    Args:
        path: of the snapshot.
        part: what it says of its KV.

    Raises:
        OSError: it is not there any more.
    """

    def __init__(self, path: Path, part: KVPart) -> None:
        self._path = path
        self._part = part
        # The session may be saved and claimed again, by another server: then the file of this name is not ours.
        self._file_id = _id_of(path)

    @property
    def state(self) -> TableState:
        return self._part.state

    def read(self, pages: KVImage) -> None:
        """Reads the pages.

        Raises:
            DamagedFile: they are not what was written.
            OSError: they cannot be read.
        """
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._part.start)
            fill(file, pages, self._part.checksum)

    def drop(self) -> None:
        try:
            if _id_of(self._path) == self._file_id:
                keep_header(self._path)
        except OSError as error:
            log.warning("%s keeps its content until it expires: %s", self._path, error)


def _id_of(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
