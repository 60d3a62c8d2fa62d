"""Background threads for work that takes long or may hang: files, tokenizing.

A job must not share its arguments with the engine thread; its outcome is reported on the engine thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from microturn.offload.file_thread import Outcome
from microturn.offload.unbound_thread import UnboundThread

Result = TypeVar("Result")

Post = Callable[[Callable[[], None]], None]


class Background(Protocol):
    """Runs jobs on other threads."""

    def submit(self, work: Callable[[], Result], on_done: Callable[[Outcome[Result]], None]) -> None:
        """Submits a job.

        Args:
            work: called on a background thread.
            on_done: called with the outcome on the engine thread.
        """
        ...

    def close(self) -> None:
        """Accepts no more jobs. It does not wait for running ones: they may hang."""
        ...


class NewBackground(Protocol):
    """Makes a `Background`; see `BackgroundThreads`."""

    def __call__(self, post: Post, *, name: str, num_threads: int) -> Background: ...


class BackgroundThreads:
    """A few threads that run jobs in order; they start with the first job.

    Args:
        post: schedules a call on the engine thread.
        name: of the threads.
        num_threads: jobs that run at a time, so that a hanging job does not block the others.
    """

    def __init__(self, post: Post, *, name: str, num_threads: int) -> None:
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [UnboundThread(self._live, f"{name}-{number}") for number in range(num_threads)]
        self._has_begun = False

    def submit(self, work: Callable[[], Result], on_done: Callable[[Outcome[Result]], None]) -> None:
        if self._is_closed:
            return
        self._jobs.put(partial(self._run, work, on_done))
        if not self._has_begun:
            self._has_begun = True
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        self._is_closed = True
        for _ in self._threads:
            self._jobs.put(None)

    def _live(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_closed:
            job()

    def _run(self, work: Callable[[], Result], on_done: Callable[[Outcome[Result]], None]) -> None:
        self._post(partial(on_done, Outcome.of(work)))
