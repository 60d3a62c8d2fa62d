"""The thread that reads and writes files, by priority.

A job must not share its arguments with the engine thread; its outcome is reported on the engine thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Generic, TypeVar

from microturn.offload.unbound_thread import UnboundThread

Result = TypeVar("Result")


class Priority(IntEnum):
    """Priorities of jobs; lower runs first."""

    TURN = 0  # a turn waits for it
    AHEAD = 1  # a turn is expected soon
    LATER = 2


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """The outcome of a job: its result or its error."""

    value: Result | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, work: Callable[[], Result]) -> Outcome[Result]:
        """Runs a job."""
        try:
            return cls(value=work())
        except Exception as error:
            return cls(error=error)


@dataclass(eq=False)
class Job:
    """A submitted job."""

    run: Callable[[], None]
    priority: Priority


class FileThread:
    """Runs jobs one after the other, by priority and then in order.

    Args:
        post: schedules a call on the engine thread.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = UnboundThread(self._live, "microturn-files")
        self._thread.start()

    def submit(self, work: Callable[[], Result], on_done: Callable[[Outcome[Result]], None], priority: Priority) -> Job:
        """Submits a job.

        Args:
            work: called on this thread.
            on_done: called with the outcome on the engine thread.
            priority: of the job.
        """
        job = Job(partial(self._run, work, on_done), priority)
        with self._changed:
            self._waiting[priority].append(job)
            self._changed.notify()
        return job

    def hurry(self, job: Job) -> None:
        """Gives the highest priority to a job that has not started."""
        with self._changed:
            if job in self._waiting[job.priority]:
                self._waiting[job.priority].remove(job)
                job.priority = Priority.TURN
                self._waiting[job.priority].append(job)

    def close(self) -> None:
        """Ends the thread after the running job; the others are dropped, and no outcome is reported any more."""
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

    def _run(self, work: Callable[[], Result], on_done: Callable[[Outcome[Result]], None]) -> None:
        self._post(partial(self._tell, on_done, Outcome.of(work)))

    def _tell(self, on_done: Callable[[Outcome[Result]], None], outcome: Outcome[Result]) -> None:
        if not self._is_closed:
            on_done(outcome)
