"""The processes of the other ranks, as rank 0 sees them: started, told what to do, and watched.

A rank that is lost takes its share of every session's keys and values with it, and the others wait for its part of a
sum. So nothing goes on without it: this process ends, and what watches over it starts all of them anew, as where this
process has died itself. While the model is loaded, loading fails instead.
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
from threading import Thread, Timer

import torch.distributed as dist

from microturn.errors import InvalidArgument, reason_of
from microturn.model.parallel import cpus
from microturn.model.parallel.commands import Command
from microturn.model.parallel.ranks import Ranks, place_of

log = logging.getLogger(__name__)


# How long what has been logged may take to be written, before this process ends.
_PATIENCE_S = 2.0


def end_process() -> None:
    """Ends this process at once: its threads may wait for what does not come any more."""
    end = Timer(_PATIENCE_S, os._exit, (1,))
    end.daemon = True
    end.start()
    logging.shutdown()
    os._exit(1)


class Followers:
    """The other ranks of a model.

    Attributes:
        size: number of the ranks, this process as rank 0 included.
        is_serving: whether the model is loaded, so that a lost rank ends this process.

    Args:
        size: see above.
        device: of all ranks, ``cpu`` or ``cuda``.
        on_lost: called, in any thread, when one of them is lost.
        binds: whether each rank runs on its share of the CPUs that this thread may use.

    Raises:
        InvalidArgument: this process shares a model already.
    """

    def __init__(
        self, size: int, device: str = "cpu", on_lost: Callable[[], None] = end_process, *, binds: bool = False
    ) -> None:
        if dist.is_initialized():
            raise InvalidArgument("this process shares a model with others already: it can have one")
        self.size = size
        self._num_told = 0
        self.is_serving = False
        self._device = device
        self._on_lost = on_lost
        self._is_closed = False
        self._place = os.memfd_create("microturn-ranks")
        # Nobody writes into it: the others read its end when this process has ended, in whatever way.
        self._lifeline, self._alive = os.pipe()
        self._cpus = os.sched_getaffinity(0)
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
        # Not with modules of the working directory (-P).
        command = [_python(), "-P", "-m", "microturn.model.parallel.follower"]
        fds = there.fileno(), self._lifeline, self._place
        command += map(str, (*fds, rank, self.size, self._device, int(binds)))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # Not among those whom a terminal interrupts: stopping is rank 0's decision.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=fds, env=environment, start_new_session=True
        )
        there.close()
        self._connections.append(here)
        self._processes.append(process)

    @cached_property
    def ranks(self) -> Ranks:
        """All ranks; they meet when the others have been told the first command.

        Raises:
            RuntimeError: one does not come.
        """
        self._hear()
        return Ranks(place_of(self._place), 0, self.size, self._device)

    def tell(self, command: Command) -> None:
        """Has all other ranks do a command; this one does its part meanwhile, within `together`."""
        # Not by the connection's own pickler, in which torch has tensors lie in shared memory.
        told = pickle.dumps(command)
        self._num_told += 1
        for connection in self._connections:
            connection.send_bytes(told)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails within, once the others have been told, leaves them waiting for this rank: then they are lost."""
        num_before = self._num_told
        try:
            yield
        except Exception as error:
            if self._num_told > num_before:
                self._lose(reason_of(error))
            raise

    @contextmanager
    def doing(self, command: Command) -> Iterator[Ranks]:
        """Has all other ranks do a command, while this one does its part."""
        with self.together():
            self.tell(command)
            yield self.ranks

    def wait(self) -> int:
        """Waits until the other ranks have loaded what they were told to.

        Returns:
            Bytes of their weights.

        Raises:
            RuntimeError: one has ended.
        """
        return sum(map(int, self._hear()))

    def _hear(self) -> list[bytes]:
        """What each of the other ranks says next."""
        heard = []
        for rank, connection in enumerate(self._connections, 1):
            try:
                heard.append(connection.recv_bytes())
            except (EOFError, OSError):
                raise RuntimeError(f"the process of rank {rank} has ended; its last lines say why") from None
        return heard

    def close(self) -> None:
        """Ends the processes of the other ranks, which have nothing that could be lost; does nothing a second time."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.wait()
            connection.close()
        for descriptor in (self._place, self._lifeline, self._alive):
            os.close(descriptor)
        if "ranks" in self.__dict__:
            self.ranks.leave()
        os.sched_setaffinity(0, self._cpus)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._lose(f"rank {rank} has ended with {process.wait()}")

    def _lose(self, why: str) -> None:
        if self._is_closed:
            return
        if self.is_serving:
            log.critical("a rank of the model is lost, and this process ends with it: %s", why)
            self._on_lost()
        else:
            log.error("a rank of the model is lost while it is loaded: %s", why)


def _python() -> str:
    """The interpreter: in a program that embeds it, as Triton's stub does, `sys.executable` is something else."""
    if Path(sys.executable).name.startswith("python"):
        return sys.executable
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = shutil.which(name)
    if found is None:
        raise RuntimeError(f"no {name} is found for the processes of the other ranks")
    return found
