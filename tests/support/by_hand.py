"""What is done beside the engine's thread, done when a test or a simulator says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

from microturn.offload import file_thread
from microturn.offload.background import Post
from microturn.offload.file_thread import FileThreads, Outcome


class ByHand:
    """A `Background` without threads.

    Attributes:
        jobs: those that have not been done; who leaves them there has a disk that hangs.
    """

    def __init__(self, post: Post, *, name: str, num_threads: int) -> None:
        self.name = name
        self.num_threads = num_threads
        self.jobs: deque[Callable[[], None]] = deque()
        self.is_closed = False
        self._post = post

    def submit(self, work: Callable[[], Any], on_done: Callable[[Outcome[Any]], None]) -> None:
        if not self.is_closed:
            self.jobs.append(partial(self._run, work, on_done))

    def close(self) -> None:
        self.is_closed = True
        self.jobs.clear()

    def do(self, at: int = 0) -> None:
        """Does one job; the engine is told of it when it takes its posts."""
        self.jobs.rotate(-at)
        job = self.jobs.popleft()
        self.jobs.rotate(at)
        job()

    def _run(self, work: Callable[[], Any], on_done: Callable[[Outcome[Any]], None]) -> None:
        try:
            outcome = Outcome(value=work())
        except Exception as error:
            outcome = Outcome(error=error)
        self._post(partial(on_done, outcome))


class AllByHand:
    """Makes them, and keeps them by their names."""

    def __init__(self) -> None:
        self.of: dict[str, ByHand] = {}

    def __call__(self, post: Post, *, name: str, num_threads: int) -> ByHand:
        self.of[name] = ByHand(post, name=name, num_threads=num_threads)
        return self.of[name]


class FilesByHand(FileThreads):
    """`FileThreads` without threads: what was submitted is done by `do_all`, always in the same order."""

    def __init__(self, post: Post) -> None:
        with patch.object(file_thread.UnboundThread, "start"):
            super().__init__(post)
        self._threads = []

    def do_all(self) -> None:
        """Those that turns wait for first."""
        while jobs := next((jobs for jobs in self._waiting.values() if jobs), None):
            jobs.popleft().run()

    def close(self, last: Iterable[Callable[[], object]] = ()) -> None:
        super().close()
        for work in last:
            work()
