"""KV that restored sessions bring along: it stays in its file, or in memory, until it is loaded into pages.

A `KVSource` knows where it is. The bookkeeping runs on the engine thread; threads, started with the first file,
access files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from microturn.kv.image import KVImage
from microturn.kv.stored import StoredImage
from microturn.kv.table_state import TableState
from microturn.offload.file_thread import FileThreads, Outcome, Priority


class KVSource(Protocol):
    """The KV of one session."""

    @property
    def pages(self) -> KVImage | None:
        """The pages, where they are in host memory and can be loaded from there; otherwise they are read."""
        ...

    @property
    def state(self) -> TableState:
        """The state of the page table that the pages belong to."""
        ...

    def read(self, pages: KVImage) -> None:
        """Reads all pages, or raises."""
        ...

    def drop(self) -> None:
        """Drops the pages from the file. Raises nothing: what cannot be dropped is removed when the file expires."""
        ...


class IncomingFiles:
    """Copies in the files of restored sessions.

    Args:
        new_image: allocates an image of n pages to read into.
        post: schedules a call on the engine thread.
    """

    def __init__(self, new_image: Callable[[int], KVImage], post: Callable[[Callable[[], None]], None]) -> None:
        self._new_image = new_image
        self._post = post
        self._sources: dict[StoredImage, KVSource] = {}
        self._leaving: set[KVSource] = set()
        self._started: FileThreads | None = None

    def __iter__(self) -> Iterator[StoredImage]:
        return iter(self._sources)

    def __contains__(self, image: StoredImage) -> bool:
        return image in self._sources

    def add(self, image: StoredImage, source: KVSource) -> None:
        self._sources[image] = source

    def reader(self, image: StoredImage) -> Callable[[], KVImage]:
        """A function that reads a copy, in any thread."""
        return partial(_read, self._sources[image], self._new_image)

    def remove(self, image: StoredImage) -> None:
        """Drops a copy that is not being read."""
        source = self._sources.pop(image)
        self._leaving.add(source)
        self.threads.submit(source.drop, partial(self._has_dropped, source), Priority.LATER)

    def close(self) -> None:
        """Ends the threads and drops the remaining copies, as many as they can in a second: what is left expires."""
        sources = [*self._leaving, *self._sources.values()]
        if sources or self._started is not None:
            self.threads.close(source.drop for source in sources)
        self._leaving.clear()
        self._sources.clear()

    def _has_dropped(self, source: KVSource, outcome: Outcome[None]) -> None:
        self._leaving.discard(source)

    @property
    def threads(self) -> FileThreads:
        """Run the jobs on files."""
        if self._started is None:
            self._started = FileThreads(self._post)
        return self._started


def _read(source: KVSource, new_image: Callable[[int], KVImage]) -> KVImage:
    pages = new_image(source.state.num_pages)
    source.read(pages)
    return pages
