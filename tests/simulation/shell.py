"""The client library's sans-I/O core on a simulated stream: what its asyncio and threaded shells do, by events."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from microturn_client._errors import ConnectionLost
from microturn_client._messages_pb2 import ModelStreamInferResponse
from microturn_client._session_core import SessionCore
from simulation.network import Stream
from simulation.raw_person import Connect
from simulation.world import Event, World

# A connection that is refused is known to be after so long.
_REFUSED_S = 1e-3


class Shell:
    """The streams of one core, one at a time, and its timer.

    Args:
        world: the clock.
        core: the session's protocol.
        connect: opens a stream.
        heard: something may have come for a turn.
    """

    def __init__(self, world: World, core: SessionCore, connect: Connect, heard: Callable[[], None]) -> None:
        self.core = core
        self._world = world
        self._connect = connect
        self._heard = heard
        self._stream: Stream | None = None
        self._number = 0
        self._timer: Event | None = None

    def flush(self) -> None:
        """Writes what the core wants sent."""
        if not self.core.wants_stream:
            self._drop()
        requests = self.core.requests_to_send()
        if requests and self._stream is None:
            self._number += 1
            number = self._number
            self._stream = self._connect(
                self.core.id, lambda message: self._hear(number, message), lambda: self._lost(number)
            )
            if self._stream is not None:
                self._stream.survives_loss = True
            else:
                self._world.after(_REFUSED_S, lambda: self._lost(number))
        if self._stream is not None:
            for request in requests:
                self._stream.send(request)
        self._set_timer()

    def close(self) -> None:
        """Leaves the stream, whatever is on it."""
        self._drop()
        self._cancel_timer()

    def _hear(self, number: int, message: ModelStreamInferResponse) -> None:
        if number == self._number:
            self.core.receive(message)
            self.flush()
            self._heard()

    def _lost(self, number: int) -> None:
        if number == self._number:
            self._drop()
            self.core.connection_lost(ConnectionLost("the stream broke"))
            self.flush()
            self._heard()

    def _drop(self) -> None:
        self._number += 1
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _set_timer(self) -> None:
        self._cancel_timer()
        due_s = self.core.wake_at
        if due_s is not None and due_s != math.inf:
            self._timer = self._world.at(due_s, self._tick)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.call_off()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self.core.tick()
        self.flush()
        self._heard()


def clock_of(world: World) -> Any:
    """The client's monotonic clock."""
    return lambda: world.now_s
