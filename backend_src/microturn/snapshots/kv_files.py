"""KV in files of its own, beside the snapshot of a session that goes on: each has the pages that have come since.

    <digest of the id>.snapshot    the session, without KV, and how many pages of which files make it up
    <digest of the id>.kv/EPOCH    pages: a header with a `KVPart`, then their tensors

A file is never changed, and named by the epoch of the snapshot that it was written for. When there are many, the next
one has all pages, and the others are removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from microturn.errors import DeadlineExceeded
from microturn.kv.image import KVImage, PagePart
from microturn.kv.table_state import TableState
from microturn.offload.copies import KVCopy
from microturn.offload.image_file import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    DamagedFile,
    header_bytes,
    read_tensors,
)
from microturn.snapshots.file import Readable, pieces_of
from microturn.snapshots.kv_part import KVPart, add_to_header, table_of
from microturn.snapshots.storage import Content, Storage

# Then the next file has all pages: reading takes an open, and each file has some pages that count no more.
MAX_FILES = 32
_ENTRY = "kv_files"


@dataclass(frozen=True)
class KVFiles:
    """The files that make up a session's KV.

    Attributes:
        state: of the page table that the pages belong to.
        files: name, and how many of its first pages count, in the order of the table.
    """

    state: TableState
    files: tuple[tuple[str, int], ...]

    def cut(self, num_pages: int) -> tuple[tuple[str, int], ...]:
        """The files of the first pages."""
        left: list[tuple[str, int]] = []
        for name, number in self.files:
            if num_pages > 0:
                left.append((name, min(number, num_pages)))
            num_pages -= number
        return tuple(left)

    def as_entry(self) -> dict[str, Any]:
        """What is added to a snapshot's state; see `of_state`."""
        return {_ENTRY: {"table": asdict(self.state), "files": self.files}}

    @classmethod
    def of_state(cls, state: Any) -> KVFiles | None:
        """The files that a snapshot's state names; None if none.

        Raises:
            ValueError, TypeError, LookupError: it does not name them as `as_entry` does.
        """
        if _ENTRY not in state:
            return None
        said = state[_ENTRY]
        files = tuple((str(name), int(number)) for name, number in said["files"])
        if any(not name.isdecimal() for name, _ in files):
            raise ValueError("a file of another directory")
        return cls(table_of(said["table"]), files)


class FiledKV:
    """A `KVSource`: the KV of a claimed snapshot in its files.

    Args:
        storage: where the files are.
        folder: in it.
        files: which.
    """

    def __init__(self, storage: Storage, folder: str, files: KVFiles) -> None:
        self._storage = storage
        self._folder = folder
        self._files = files

    @property
    def pages(self) -> None:
        """None: they are in files."""

    @property
    def state(self) -> TableState:
        return self._files.state

    def read(self, pages: KVImage) -> None:
        """Reads the pages.

        Raises:
            DamagedFile: they differ from what was written.
            OSError: they cannot be read.
        """
        pages.fill_with((self._read_file(name, pages.parts), number) for name, number in self._files.files)

    def drop(self) -> None:
        # What the session's next server writes there has other names.
        with suppress(OSError):  # it is removed when it is old enough
            for name, _ in self._files.files:
                self._storage.remove(f"{self._folder}/{name}")

    def _read_file(self, name: str, parts: Sequence[PagePart]) -> KVImage:
        with self._storage.open(f"{self._folder}/{name}") as file:
            try:
                part = read_part(file)
            except ValueError as error:
                raise DamagedFile(str(error)) from error
            if not part.is_of(parts):
                raise DamagedFile("its pages are others")
            image = KVImage(parts, part.state.num_pages - part.num_before)
            read_tensors(file, image, part.checksum)
        return image


def kv_content(kv: KVCopy, is_wanted: Callable[[], bool]) -> Content:
    """What stands in a file of pages; it raises DeadlineExceeded before a piece that is not wanted any more."""

    def pieces() -> Iterator[memoryview]:
        for piece in pieces_of(kv.pages):
            if not is_wanted():
                raise DeadlineExceeded("there is no time to write this KV")
            yield piece

    head = head_of(kv)
    return Content(head, pieces(), len(head) + kv.pages.num_bytes)


def head_of(kv: KVCopy, *, is_checked: bool = True) -> bytes:
    """What stands before pages in a file or a stream; see `read_part`, and `kv_part.add_to_header`."""
    header: dict[str, Any] = {"__metadata__": {}}
    add_to_header(header, kv, 0, is_checked=is_checked)
    return header_bytes(header)


def read_part(stream: Readable) -> KVPart:
    """The description of pages at the beginning of a file or a stream.

    Raises:
        ValueError: there is none.
    """
    length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
    try:
        part = KVPart.of_header(json.loads(stream.read(min(length, MAX_HEADER_BYTES))), 0)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"this is not KV: {error!r}") from error
    if part is None:
        raise ValueError("this is not KV: nothing says what it is")
    return part
