"""KV in files of this process: which copies there are, how many bytes they take, which was written longest ago.

The engine's thread keeps the books here; files are touched by the file thread alone. Knows no sessions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from microturn.kv_image import KVImage
from microturn.page_table import TableState
from microturn.tiers.file_thread import FileThread, Job, Outcome, Priority
from microturn.tiers.image_file import read_image, write_image
from microturn.tiers.own_directory import OwnDirectory
from microturn.tiers.stored_kv import StoredImage


@dataclass
class _File:
    """A copy's file.

    Attributes:
        path: where it is, or will be.
        checksum: what it must have once it is written.
        reading: the job that reads it.
    """

    path: Path
    checksum: str = ""
    reading: Job | None = None


class DiskStore:
    """Copies in files, the least recently used first.

    Attributes:
        used_bytes: of KV in them, those counted in that are being written.
        max_bytes: what they may take.
        capacity_bytes: what there is room for; less than that where others have filled the disk.

    Args:
        parent: where this process makes its directory.
        max_bytes: what the files may take; 0 is half of what is free there.
        model: fingerprint of the model whose KV it is.
        new_image: makes an image of so many pages to read into.
        post: hands what is to be called over to the engine's thread.

    Raises:
        OSError: the directory cannot be made.
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
        self._model = model
        self._new_image = new_image
        self._files: dict[StoredImage, _File] = {}
        self._numbers = count()
        self._thread = FileThread(post)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[StoredImage]:
        return iter(self._files)

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.capacity_bytes

    def write(self, image: StoredImage, told: Callable[[Exception | None], None]) -> None:
        """Writes a copy.

        Args:
            image: one that is in host memory.
            told: called when it is written, or why it could not be; then the disk holds no more of it.
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
            told(outcome.error)

        work = partial(write_image, file.path, image.pages, self._model, image.state)
        self._thread.submit(work, end, Priority.LATER)

    def read(
        self, image: StoredImage, told: Callable[[KVImage | None, Exception | None], None], *, is_urgent: bool
    ) -> None:
        """Reads a copy back, whose file stays until `remove`.

        Args:
            image: one that has been written.
            told: called with its pages, or why they cannot be had.
            is_urgent: whether a turn waits for it.
        """

        def end(outcome: Outcome[KVImage]) -> None:
            told(outcome.value, outcome.error)

        priority = Priority.TURN if is_urgent else Priority.AHEAD
        self._files[image].reading = self._thread.submit(self.reader(image), end, priority)

    def reader(self, image: StoredImage) -> Callable[[], KVImage]:
        """What reads a copy that has been written, in any thread."""
        return partial(self._load, self._files[image], image.state)

    def hurry(self, image: StoredImage) -> None:
        """A turn waits for what is being read."""
        reading = self._files[image].reading
        assert reading is not None
        self._thread.hurry(reading)

    def remove(self, image: StoredImage) -> None:
        """Removes a file that nobody reads."""
        path = self._forget(image).path
        self._thread.submit(partial(path.unlink, missing_ok=True), _nobody_asks, Priority.LATER)

    def close(self) -> None:
        """Ends the thread and removes all files."""
        self._thread.close()
        self._directory.remove()

    def check_integrity(self) -> None:
        """Asserts that the bytes are counted right."""
        assert self.used_bytes == sum(image.num_bytes for image in self._files)

    def _load(self, file: _File, state: TableState) -> KVImage:
        pages = self._new_image(state.num_pages)
        read_image(file.path, pages, self._model, state, file.checksum)
        return pages

    def _forget(self, image: StoredImage) -> _File:
        self.used_bytes -= image.num_bytes
        return self._files.pop(image)


def _nobody_asks(outcome: Outcome[None]) -> None:
    """A file that could not be removed goes with the directory."""
