"""The disk tier: KV in files of this process, their total bytes and their LRU order.

The bookkeeping runs on the engine thread; only the file threads access files.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from microturn.kv.image import KVImage
from microturn.kv.stored import StoredImage
from microturn.kv.table_state import TableState
from microturn.offload.file_thread import FileThreads, Outcome, Priority
from microturn.offload.image_file import read_image, write_image
from microturn.offload.own_directory import OwnDirectory

# Seconds after which a disk that has failed, or that other programs have filled, is tried again.
_PAUSE_S = 60.0
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class _File:
    """A copy's file, and the checksum that is expected when it is read; set once it is written."""

    path: Path
    checksum: str = ""


class DiskStore:
    """Copies in files, least recently used first.

    Attributes:
        used_bytes: of KV in files, including files being written.
        max_bytes: limit of `used_bytes`.
        capacity_bytes: what fits; less than `max_bytes` if other programs have filled the disk.
        threads: run the jobs on files.

    Args:
        parent: where this process creates its directory.
        max_bytes: limit of the files; 0 is half of the free disk space.
        model: the model's fingerprint.
        new_image: allocates an image of n pages to read into.
        post: schedules a call on the engine thread.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(
        self,
        parent: Path,
        max_bytes: int,
        model: str,
        new_image: Callable[[int], KVImage],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._directory = OwnDirectory(parent)
        self.max_bytes = max_bytes or shutil.disk_usage(parent).free // 2
        self.capacity_bytes = self.max_bytes
        self.used_bytes = 0
        self._failed_s = -math.inf
        self._takes_nothing = False
        self._model = model
        self._new_image = new_image
        self._files: dict[StoredImage, _File] = {}
        self._numbers = count()
        self.threads = FileThreads(post)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[StoredImage]:
        return iter(self._files)

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.capacity_bytes

    def takes_files(self, now_s: float) -> bool:
        """Whether to write at all, by the engine's clock."""
        if now_s >= self._failed_s + _PAUSE_S:
            self.capacity_bytes, self._takes_nothing = self.max_bytes, False
        return not self._takes_nothing

    def note_failure(self, error: Exception, now_s: float) -> None:
        """Notes that a copy could not be written.

        A full disk holds less than assumed: for a while the least recently used files make room. Where that does not
        help, or the disk has another fault, nothing is written for so long, and no file is lost for it.
        """
        is_full = isinstance(error, OSError) and error.errno in _IS_FULL
        self._takes_nothing = not is_full or self.capacity_bytes < self.max_bytes
        self.capacity_bytes = self.used_bytes
        self._failed_s = now_s

    def write(self, image: StoredImage, on_done: Callable[[Exception | None], None]) -> None:
        """Writes a copy.

        Args:
            image: a copy in host memory.
            on_done: called when it is written, with None or the error; after an error the disk holds nothing of it.
        """
        assert image.pages is not None
        file = _File(self._directory.path / f"{next(self._numbers)}.safetensors")
        self._files[image] = file
        self.used_bytes += image.num_bytes

        def end(outcome: Outcome[str]) -> None:
            if outcome.value is None:
                self._forget(image)
            else:
                file.checksum = outcome.value
            on_done(outcome.error)

        work = partial(write_image, file.path, image.pages, self._model, image.state)
        self.threads.submit(work, end, Priority.LATER)

    def reader(self, image: StoredImage) -> Callable[[], KVImage]:
        """A function that reads a written copy, in any thread; its file stays until `remove`."""
        return partial(self._load, self._files[image], image.state)

    def remove(self, image: StoredImage) -> None:
        """Removes the file of a copy that is not being read."""
        path = self._forget(image).path
        self.threads.submit(partial(path.unlink, missing_ok=True), _ignore, Priority.LATER)

    def close(self) -> None:
        """Ends the threads and removes all files."""
        self.threads.close()
        self._directory.remove()

    def check_integrity(self) -> None:
        """Asserts that the byte counts are right."""
        assert self.used_bytes == sum(image.num_bytes for image in self._files)

    def _load(self, file: _File, state: TableState) -> KVImage:
        pages = self._new_image(state.num_pages)
        read_image(file.path, pages, self._model, state, file.checksum)
        return pages

    def _forget(self, image: StoredImage) -> _File:
        self.used_bytes -= image.num_bytes
        return self._files.pop(image)


def _ignore(outcome: Outcome[None]) -> None:
    """Ignores a failed removal: the file is removed with the directory."""
