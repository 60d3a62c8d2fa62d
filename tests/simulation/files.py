"""The threads that read and write files, under the virtual clock, on a disk that may be slow, full, broken or frozen.

The jobs themselves are the product's own and touch real files; when they are done, and whether, is decided here.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from microturn.offload.file_thread import NUM_READERS, Job, Outcome, Priority
from simulation.world import World


class Disk:
    """What may be wrong with a server's disk.

    Attributes:
        error: what every job fails with; None is nothing.
        frozen_until_s: no job ends before.
        num_jobs: those that are not done.

    Args:
        world: the clock.
        random: of how long a job takes, and of damage.
    """

    def __init__(self, world: World, random: Random) -> None:
        self.error: int | None = None
        self.frozen_until_s = 0.0
        self.num_jobs = 0
        self.world = world
        self.random = random

    def job_s(self) -> float:
        """How long the next job takes."""
        return max(self.random.uniform(1e-4, 5e-3), self.frozen_until_s - self.world.now_s)

    def damage(self, directory: Path, pattern: str) -> int:
        """Something happens to all files of a kind: a bit is flipped, or the end is cut off. Says to how many."""
        files = sorted(directory.glob(pattern))
        for file in files:
            content = bytearray(file.read_bytes())
            if not content:
                continue
            at = self.random.randrange(len(content))
            if self.random.random() < 0.5:
                content[at] ^= 1 << self.random.randrange(8)
            else:
                del content[at:]
            file.write_bytes(content)
        return len(files)


class VirtualFileThreads:
    """In the place of `FileThreads`.

    Args:
        disk: where the files are.
        wake: the engine has been posted something.
        post: see `FileThreads`.
    """

    def __init__(self, disk: Disk, wake: Callable[[], None], post: Callable[[Callable[[], None]], None]) -> None:
        self._disk = disk
        self._wake = wake
        self._post = post
        self._waiting: dict[Priority, deque[Job]] = {priority: deque() for priority in Priority}
        self._num_reading = self._num_writing = 0
        self._is_closed = False

    def submit(self, work: Callable[[], Any], on_done: Callable[[Outcome[Any]], None], priority: Priority) -> Job:
        job = Job(partial(self._run, work, on_done), priority)
        self._waiting[priority].append(job)
        self._disk.num_jobs += 1
        self._begin_next()
        return job

    def hurry(self, job: Job) -> None:
        if job in self._waiting[job.priority]:
            self._waiting[job.priority].remove(job)
            job.priority = Priority.TURN
            self._waiting[job.priority].append(job)

    def close(self, last: Iterable[Callable[[], object]] = ()) -> None:
        self._is_closed = True
        for work in last:
            work()

    def _begin_next(self) -> None:
        reads = self._waiting[Priority.TURN] or self._waiting[Priority.AHEAD]
        if reads and self._num_reading < NUM_READERS:
            self._num_reading += 1
            self._begin(reads.popleft())
        writes = self._waiting[Priority.LATER]
        if writes and not self._num_writing:
            self._num_writing = 1
            self._begin(writes.popleft())

    def _begin(self, job: Job) -> None:
        self._disk.world.after(self._disk.job_s(), partial(self._end, job))

    def _end(self, job: Job) -> None:
        if job.priority is Priority.LATER:
            self._num_writing = 0
        else:
            self._num_reading -= 1
        self._disk.num_jobs -= 1
        if not self._is_closed:
            job.run()
            self._begin_next()

    def _run(self, work: Callable[[], Any], on_done: Callable[[Outcome[Any]], None]) -> None:
        try:
            if self._disk.error is not None:
                raise OSError(self._disk.error, errno.errorcode[self._disk.error])
            outcome: Outcome[Any] = Outcome(value=work())
        except Exception as error:
            outcome = Outcome(error=error)
        self._post(partial(self._tell, on_done, outcome))
        self._wake()

    def _tell(self, on_done: Callable[[Outcome[Any]], None], outcome: Outcome[Any]) -> None:
        if not self._is_closed:
            on_done(outcome)


class VirtualBackground:
    """In the place of `BackgroundThreads`: several jobs at once, each as long as the disk takes.

    Args:
        disk: where the files are.
        wake: the engine has been posted something.
        post: see `BackgroundThreads`.
    """

    def __init__(
        self, disk: Disk, wake: Callable[[], None], post: Callable[[Callable[[], None]], None], **_: object
    ) -> None:
        self._disk = disk
        self._wake = wake
        self._post = post
        self._is_closed = False

    def submit(self, work: Callable[[], Any], on_done: Callable[[Outcome[Any]], None]) -> None:
        if not self._is_closed:
            self._disk.num_jobs += 1
            self._disk.world.after(self._disk.job_s(), partial(self._do, work, on_done))

    def close(self) -> None:
        self._is_closed = True

    def _do(self, work: Callable[[], Any], on_done: Callable[[Outcome[Any]], None]) -> None:
        self._disk.num_jobs -= 1
        if self._is_closed:
            return
        try:
            outcome: Outcome[Any] = Outcome(value=work())
        except Exception as error:
            outcome = Outcome(error=error)
        self._post(partial(on_done, outcome))
        self._wake()
