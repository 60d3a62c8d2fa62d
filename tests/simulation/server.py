"""A server as its clients meet it: Triton, and behind it a model process, which may stop, die and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from microturn.admin.drain import drain
from microturn.errors import Unavailable
from microturn_client._messages_pb2 import ModelStreamInferResponse
from simulation.backend import Backend
from simulation.files import Disk
from simulation.network import Delays, Stream
from simulation.pb_utils import InferenceRequest
from simulation.settings import Drawn
from simulation.triton import Triton
from simulation.world import World

TRITON_IDLE_S = 7200.0
_DRAIN_S = 10.0


def server_of(session_id: int | str, servers: Sequence[Server]) -> Server:
    """Where a session is: the same in every process and every run."""
    number = session_id if isinstance(session_id, int) else sum(session_id.encode())
    return servers[number % len(servers)]


class Server:
    """One replica.

    Attributes:
        backend: the model process that there is; None while the server is down.
        triton: what stands before it.
        num_lives: how often it was started.

    Args:
        world: the clock.
        number: of the replica.
        drawn: how it is set.
        delays: of messages.
        directory: its files.
    """

    def __init__(self, world: World, number: int, drawn: Drawn, delays: Delays, directory: Path) -> None:
        self.backend: Backend | None = None
        self.triton: Triton | None = None
        self.num_lives = 0
        self.number = number
        self.directory = directory
        self.disk = Disk(world, world.random("disk", number))
        self.drawn = drawn
        self._world = world
        self._delays = delays
        self._random = world.random("server", number)
        self.is_stopping = False
        directory.mkdir(parents=True)
        self.start()

    @property
    def is_up(self) -> bool:
        """Whether it takes requests."""
        return self.backend is not None and self.backend.is_alive and not self.is_stopping

    def start(self) -> None:
        """A new process, which knows nothing but what is saved."""
        is_kept = self.backend is not None and self.drawn.settings.snapshot_dir
        saved = self.backend.oracle.plain.saved if self.backend is not None and is_kept else {}
        self.num_lives += 1
        self.is_stopping = False
        self.triton = Triton(self._world, self._random, self.drawn.num_slots, TRITON_IDLE_S, self._execute)
        self.backend = Backend(
            self._world, self._random, self.drawn, self.disk, self.directory, self.triton.receive_from_model
        )
        self.backend.oracle.plain.saved = saved
        self._world.say(f"server {self.number} starts")

    def connect(
        self, on_message: Callable[[ModelStreamInferResponse], None], on_broken: Callable[[], None]
    ) -> Stream | None:
        """A stream to it; None where nothing listens."""
        if self.triton is None:
            return None
        return Stream(self._world, self.triton, self._random, self._delays, on_message, on_broken)

    def _execute(self, requests: list[InferenceRequest]) -> None:
        assert self.backend is not None
        self.backend.execute(requests)

    # ---- how it ends ---------------------------------------------------------------------------------------------

    def kill(self, for_s: float) -> None:
        """It is gone at once, and comes back."""
        if self.triton is None:
            return
        assert self.backend is not None
        self.backend.die()
        triton, self.triton = self.triton, None
        triton.is_stub_alive = False
        for stream in list(triton.streams):
            stream.break_off()
        self._world.after(for_s, self.start)

    def kill_stub(self, for_s: float) -> None:
        """The model process is gone, and Triton says so to those only who ask anew; then it is started again."""
        if self.triton is None or not self.triton.is_stub_alive:
            return
        assert self.backend is not None
        self.backend.die()
        self.triton.is_stub_alive = False
        self._world.after(for_s, lambda: self.kill(0.5))

    def stop(self, for_s: float) -> None:
        """It is stopped in order, with its sessions saved where there is a place for them, and comes back."""
        if not self.is_up:
            return
        assert self.backend is not None
        self.is_stopping = True
        backend = self.backend
        engine = backend.engine
        engine.call = backend.call  # type: ignore[method-assign]
        try:
            drain(engine, _DRAIN_S)
        except Unavailable:
            return  # it has died meanwhile
        if backend is self.backend and backend.is_alive:
            self.kill(for_s)

    def freeze(self, for_s: float) -> None:
        """Nothing happens there for a while."""
        if not self.is_up:
            return
        assert self.backend is not None
        assert self.triton is not None
        backend, triton = self.backend, self.triton
        backend.freeze(for_s)
        triton.is_frozen = True

        def thaw() -> None:
            triton.is_frozen = False
            triton.wake()

        self._world.after(for_s, thaw)
