"""The threads that read and write files, by priority.

A job must not share its arguments with the engine thread; its outcome is reported on the engine thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Generic, TypeVar

from microturn.offload.unbound_thread import UnboundThread

Result = TypeVar("Result")

# Threads that read: while fewer files than these hang, the others are read all the same.
NUM_READERS = 4

# Seconds that the end of the threads takes at most.
_CLOSE_S = 1.0


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


class FileThreads:
    """Runs jobs by priority and then in order.

        TURN, AHEAD    a few threads, which read: a file that hangs or is large holds up no other
        LATER          one thread, which writes and removes, one after the other

    Args:
        post: schedules a call on the engine thread.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._waiting: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}
        self._last: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        read, write = partial(self._live, (Priority.TURN, Priority.AHEAD)), partial(self._live, (Priority.LATER,))
        self._threads = [UnboundThread(read, f"microturn-files-{number}") for number in range(NUM_READERS)]
        self._threads.append(UnboundThread(write, "microturn-files-later"))
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Result], on_done: Callable[[Outcome[Result]], None], priority: Priority) -> Job:
        """Submits a job.

        Args:
            work: called on one of these threads.
            on_done: called with the outcome on the engine thread.
            priority: of the job.
        """
        job = Job(partial(self._run, work, on_done), priority)
        with self._changed:
            self._waiting[priority].append(job)
            self._changed.notify_all()
        return job

    def hurry(self, job: Job) -> None:
        """Gives the highest priority to a job that has not started."""
        with self._changed:
            if job in self._waiting[job.priority]:
                self._waiting[job.priority].remove(job)
                job.priority = Priority.TURN
                self._waiting[job.priority].append(job)

    def close(self, last: Iterable[Callable[[], object]] = ()) -> None:
        """Ends the threads; jobs that have not begun are dropped, and no outcome is reported any more.

        Waits a second at most: one that hangs is left behind.

        Args:
            last: what is still to be done, as far as there is time.
        """
        ends_s = time.monotonic() + _CLOSE_S
        with self._changed:
            self._is_closed = True
            self._last.extend(last)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, ends_s - time.monotonic()))
        with self._changed:
            self._last.clear()

    def _live(self, priorities: Sequence[Priority]) -> None:
        while (run := self._next(priorities)) is not None:
            run()

    def _next(self, priorities: Sequence[Priority]) -> Callable[[], object] | None:
        with self._changed:
            while not self._is_closed:
                for priority in priorities:
                    if self._waiting[priority]:
                        return self._waiting[priority].popleft().run
                self._changed.wait()
            return partial(Outcome.of, self._last.popleft()) if self._last else None

    def _run(self, work: Callable[[], Result], on_done: Callable[[Outcome[Result]], None]) -> None:
        self._post(partial(self._tell, on_done, Outcome.of(work)))

    def _tell(self, on_done: Callable[[Outcome[Result]], None], outcome: Outcome[Result]) -> None:
        if not self._is_closed:
            on_done(outcome)
