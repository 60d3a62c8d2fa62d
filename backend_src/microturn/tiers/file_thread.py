"""The thread that reads and writes files. It knows jobs and their order; it knows no files and no sessions.

What a job is told it must not share with the engine's thread; what it has done is told there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Priority(IntEnum):
    """What goes first."""

    TURN = 0  # a turn waits for it
    AHEAD = 1  # a turn will want it soon
    LATER = 2


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What became of a job: what it returned, or why it failed."""

    value: Result | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """Something to be done once."""

    run: Callable[[], None]
    priority: Priority


class FileThread:
    """Does one job after the other, those of the highest priority first, and else in their order.

    Args:
        post: hands what is to be called over to the engine's thread.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._live, name="microturn-files", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Result], told: Callable[[Outcome[Result]], None], priority: Priority) -> Job:
        """Has something done on the thread.

        Args:
            work: called there.
            told: called with what became of it, by the engine's thread.
            priority: when it is to be done.
        """
        job = Job(partial(self._run, work, told), priority)
        with self._changed:
            self._waiting[priority].append(job)
            self._changed.notify()
        return job

    def hurry(self, job: Job) -> None:
        """Gives a job that has not begun the highest priority."""
        with self._changed:
            if job in self._waiting[job.priority]:
                self._waiting[job.priority].remove(job)
                job.priority = Priority.TURN
                self._waiting[job.priority].append(job)

    def close(self) -> None:
        """Ends the thread after the present job; the others are not done, and nobody is told of any from now on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _live(self) -> None:
        while (job := self._next()) is not None:
            job.run()

    def _next(self) -> Job | None:
        with self._changed:
            while not self._is_closed:
                for jobs in self._waiting.values():
                    if jobs:
                        return jobs.popleft()
                self._changed.wait()
        return None

    def _run(self, work: Callable[[], Result], told: Callable[[Outcome[Result]], None]) -> None:
        try:
            outcome = Outcome(value=work())
        except Exception as error:
            outcome = Outcome(error=error)
        self._post(partial(self._tell, told, outcome))

    def _tell(self, told: Callable[[Outcome[Result]], None], outcome: Outcome[Result]) -> None:
        if not self._is_closed:
            told(outcome)
