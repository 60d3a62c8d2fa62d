"""The processes of the other ranks, as rank 0 sees them: started, told what to do, and watched.

A rank that is lost takes its share of every session's keys and values with it, and the others wait for its part of a
sum. So nothing goes on without it: this process ends, and what watches over it starts all of them anew, as where this
process has died itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from threading import Thread

from microturn.errors import reason_of
from microturn.model.parallel import cpus
from microturn.model.parallel.commands import Command
from microturn.model.parallel.ranks import Ranks, place_of

log = logging.getLogger(__name__)


def end_process() -> None:
    """Ends this process at once: its threads may wait for what does not come any more."""
    logging.shutdown()  # writes what has been logged
    os._exit(1)


class Followers:
    """The other ranks of a model.

    Attributes:
        size: number of the ranks, this process as rank 0 included.
        num_told: commands so far.

    Args:
        size: see above.
        device: of all ranks, ``cpu`` or ``cuda``.
        on_lost: called, in any thread, when one of them is lost.
        binds: whether each rank runs on its share of the CPUs that this thread may use.
    """

    def __init__(
        self, size: int, device: str = "cpu", on_lost: Callable[[], None] = end_process, *, binds: bool = False
    ) -> None:
        self.size = size
        self.num_told = 0
        self._device = device
        self._on_lost = on_lost
        self._is_closed = False
        self._place = os.memfd_create("microturn-ranks")
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)
        for rank in range(1, size):
            self._start(rank, binds)
        for rank, process in enumerate(self._processes, 1):
            Thread(target=self._watch, args=(rank, process), name=f"microturn-rank-{rank}", daemon=True).start()
        if binds:
            cpus.take_share(0, size)

    def _start(self, rank: int, binds: bool) -> None:
        here, there = Pipe()
        command = [_python(), "-m", "microturn.model.parallel.follower"]
        command += map(str, (there.fileno(), self._place, rank, self.size, self._device, int(binds)))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        fds = there.fileno(), self._place
        # Not among those whom a terminal interrupts: stopping is rank 0's decision.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment, start_new_session=True
        )
        there.close()
        self._connections.append(here)
        self._processes.append(process)

    @cached_property
    def ranks(self) -> Ranks:
        """All ranks; they meet when the others have been told the first command."""
        return Ranks(place_of(self._place), 0, self.size, self._device)

    def tell(self, command: Command) -> None:
        """Has all other ranks do a command; this one does its part meanwhile, within `together`."""
        self.num_told += 1
        # Not by the connection's own pickler, in which torch has tensors lie in shared memory.
        told = pickle.dumps(command)
        for connection in self._connections:
            connection.send_bytes(told)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails within, once the others have been told, leaves them waiting for this rank: then they are lost."""
        num_before = self.num_told
        try:
            yield
        except Exception as error:
            if self.num_told > num_before:
                self._lose(reason_of(error))
            raise

    @contextmanager
    def doing(self, command: Command) -> Iterator[Ranks]:
        """Has all other ranks do a command, while this one does its part."""
        with self.together():
            self.tell(command)
            yield self.ranks

    def wait(self) -> None:
        """Waits until the other ranks have loaded what they were told to."""
        for connection in self._connections:
            connection.recv_bytes()

    def close(self) -> None:
        """Ends the processes of the other ranks, which have nothing that could be lost."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if "ranks" in self.__dict__:
            self.ranks.leave()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.wait()
            connection.close()
        os.close(self._place)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._is_closed:
            self._lose(f"rank {rank} has ended with {code}")

    def _lose(self, why: str) -> None:
        log.critical("a rank of the model is lost, and this process ends with it: %s", why)
        self._on_lost()


def _python() -> str:
    """The interpreter: in a program that embeds it, as Triton's stub does, `sys.executable` is something else."""
    if Path(sys.executable).name.startswith("python"):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise RuntimeError("no python3 is found for the processes of the other ranks")
    return found
