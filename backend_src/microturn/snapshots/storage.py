"""Where snapshots are kept: what a storage of files must do, whatever it is made of.

Names have a suffix, and a `/` where they are in a folder: `<digest>.snapshot`, `<digest>.kv/17`. Which names there are,
and what they mean, is up to `directory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


class Doubtful(OSError):
    """A change may have been made or not: no answer has come."""


@dataclass(frozen=True)
class Content:
    """What is written into a file.

    Attributes:
        head: the first bytes, which can be kept without the rest; see `Storage.cut`.
        body: the bytes behind them, in pieces of any size. It is iterated once, and may raise.
        num_bytes: of both.
    """

    head: bytes | bytearray | memoryview
    body: Iterable[bytes | bytearray | memoryview]
    num_bytes: int

    def pieces(self) -> Iterator[bytes | bytearray | memoryview]:
        """All bytes in order."""
        yield self.head
        yield from self.body


@dataclass(frozen=True)
class Listed:
    """A file, or a folder at the top.

    Attributes:
        name: of it.
        written_s: when it was written, or something in the folder, in seconds since 1970.
    """

    name: str
    written_s: float


class OpenFile(Protocol):
    """A file that is read. It stays what it was when it was opened, though another may get its name.

    Its methods raise OSError where they cannot read, and DamagedFile where they read what was not written.
    """

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        ...

    @property
    def file_id(self) -> Hashable:
        """Differs from that of another file that had, or gets, the same name."""
        ...

    def read(self, num_bytes: int, /) -> bytes:
        """The next bytes: fewer only at the end."""
        ...

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Reads into a buffer, not always all of it; returns the number of bytes, 0 at the end."""
        ...

    def seek(self, position: int, /) -> int:
        """Goes to a position, in bytes from the beginning."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class ReadInPieces(ABC):
    """What an `OpenFile` has in common that gets its bytes in pieces of its own."""

    @abstractmethod
    def _some(self, num_bytes: int) -> bytes | memoryview:
        """The next bytes, at most so many, and some unless it is the end."""

    def read(self, num_bytes: int, /) -> bytes:
        buffer = bytearray()
        while len(buffer) < num_bytes and (piece := self._some(num_bytes - len(buffer))):
            buffer += piece
        return bytes(buffer)

    def readinto(self, buffer: memoryview, /) -> int:
        piece = self._some(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def __enter__(self) -> Self:
        return self


class Storage(Protocol):
    """Keeps files; callable in any thread, and shared by servers. A method that cannot do its work raises OSError."""

    def place_of(self, name: str) -> str:
        """Where a file is, for people."""
        ...

    def write(self, name: str, content: Content) -> None:
        """Writes a file that lasts, replacing an existing one of this name when all of it is there.

        Raises:
            Doubtful: it may have been written.
            OSError: it cannot be written; with ENOSPC, EDQUOT or EFBIG where there is no room. Whether for this or for
                what the content raises: an existing file is unchanged.
        """
        ...

    def open(self, name: str) -> OpenFile:
        """Opens a file.

        Raises:
            FileNotFoundError: there is none.
            DamagedFile: it is not one that this storage has written.
        """
        ...

    def id_of(self, name: str) -> Hashable | None:
        """The `OpenFile.file_id` that a file would have if it were opened; None if there is none."""
        ...

    def move(self, name: str, to: str) -> bool:
        """Gives a file of the top another suffix, replacing an existing file of that name.

        Returns:
            Whether this call has moved it: True for only one of several concurrent callers.
        """
        ...

    def cut(self, name: str, file_id: Hashable, num_bytes: int) -> None:
        """Keeps the head of a file of the top, if it is still the one with this id.

        Args:
            name: of the file.
            file_id: of the file.
            num_bytes: length of its `Content.head`.
        """
        ...

    def remove(self, name: str, file_id: Hashable | None = None) -> None:
        """Removes a file, if there is one; with an id, if it is still the one with this id."""
        ...

    def names_in(self, folder: str) -> Collection[str]:
        """The names of the files in a folder, without the folder's; none if there is no folder."""
        ...

    def keep_only(self, folder: str, names: Collection[str] = ()) -> None:
        """Removes the files in a folder other than those named, and the folder where it is empty then."""
        ...

    def files(self) -> Iterable[Listed]:
        """The files and folders at the top, with names that begin with a point where a writer has died over them."""
        ...
