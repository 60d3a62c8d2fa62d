"""Threads beside the engine's, for what takes long or may hang: files, tokenizing. They know jobs, and nothing of what
the jobs are about.

What a job is told it must not share with the engine's thread; what it has done is told there.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from microturn.tiers.file_thread import Outcome

Result = TypeVar("Result")

Post = Callable[[Callable[[], None]], None]


class Background(Protocol):
    """What does jobs elsewhere."""

    def submit(self, work: Callable[[], Result], told: Callable[[Outcome[Result]], None]) -> None:
        """Has something done.

        Args:
            work: called elsewhere.
            told: called with what became of it, by the engine's thread.
        """
        ...

    def close(self) -> None:
        """Takes no more jobs. What is under way is not waited for: it may hang."""
        ...


class NewBackground(Protocol):
    """Makes a `Background`; see `BackgroundThreads`."""

    def __call__(self, post: Post, *, name: str, num_threads: int) -> Background: ...


class BackgroundThreads:
    """Some threads that take jobs in their order; they begin with the first job.

    Args:
        post: hands what is to be called over to the engine's thread.
        name: what the threads are called.
        num_threads: how many jobs may be under way, so that one that hangs holds no other up.
    """

    def __init__(self, post: Post, *, name: str, num_threads: int) -> None:
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._live, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        self._has_begun = False

    def submit(self, work: Callable[[], Result], told: Callable[[Outcome[Result]], None]) -> None:
        if self._is_closed:
            return
        self._jobs.put(partial(self._run, work, told))
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

    def _run(self, work: Callable[[], Result], told: Callable[[Outcome[Result]], None]) -> None:
        try:
            outcome = Outcome(value=work())
        except Exception as error:
            outcome = Outcome(error=error)
        self._post(partial(told, outcome))
