"""The gRPC stream of one session, for asyncio: writes what the core hands out, and one task reads what comes.

Everything happens on one event loop, so nothing is locked. The reader always ends by telling the core why, so nobody
waits for a task that died. A timer, armed at the end of each turn, keeps an idle session alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from microturn_client._errors import ConnectionLost, InternalError, MicroturnError, from_grpc
from microturn_client._events import Event
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import SessionCore, SessionState
from microturn_client._wire import ModelInferRequest, SessionId

# After END is answered the server ends the stream by itself; a server that does not is not waited for.
_STREAM_END_S = 1.0


class AsyncStream:
    """One stream, opened with the first request on the loop that runs then.

    Args:
        core: the session's protocol.
        open_call: opens the gRPC stream of a session over an iterator of requests.
    """

    def __init__(
        self, core: SessionCore, open_call: Callable[[SessionId, AsyncIterator[ModelInferRequest]], Any]
    ) -> None:
        self.core = core
        self._open_call = open_call
        self._requests: asyncio.Queue[ModelInferRequest | None] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._call: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reader: asyncio.Task[None] | None = None
        self._keepalive: asyncio.TimerHandle | None = None

    def flush(self) -> None:
        """Writes what the core wants sent."""
        requests = self.core.requests_to_send()
        if requests and self._reader is None:
            self._loop = asyncio.get_running_loop()
            self._call = self._open_call(self.core.id, self._outgoing())
            self._reader = self._loop.create_task(self._read(), name=f"microturn-{self.core.id}")
        for request in requests:
            self._requests.put_nowait(request)

    async def next_event(self, turn: PendingTurn) -> Event | None:
        """Waits for the next event of a turn; None when the turn is over.

        Raises:
            MicroturnError: when the turn failed or its deadline passed.
        """
        while (event := turn.next_event()) is None and not turn.is_over:
            remaining_s = self.core.remaining_s(turn)
            if remaining_s <= 0:
                self.core.time_out(turn)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(remaining_s):
                        await self._changed.wait()
        return event

    def leave(self, turn: PendingTurn) -> None:
        """Gives up a turn, also for a task that waits for its events."""
        turn.abandon()
        self._wake()

    async def close(self) -> None:
        """Ends the stream: in an orderly way when END was answered, else by force."""
        self._requests.put_nowait(None)
        try:
            if self._reader is not None and self.core.state is SessionState.CLOSED:
                await asyncio.wait((self._reader,), timeout=_STREAM_END_S)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the stream at once, from any thread; the reader then ends by itself."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    async def _outgoing(self) -> AsyncIterator[ModelInferRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self) -> None:
        error: MicroturnError = ConnectionLost("the server ended the stream")
        try:
            async for message in self._call:
                self.core.receive(message)
                self.flush()
                self._wake()
                self._arm_keepalive()
        except grpc.RpcError as failure:
            error = from_grpc(failure.code(), failure.details())
        except asyncio.CancelledError:
            error = ConnectionLost("the stream was cancelled on this side")
            raise
        except Exception as failure:
            error = InternalError(f"the client itself failed while reading: {failure!r}")
        finally:
            self._call.cancel()
            self._requests.put_nowait(None)
            self.core.connection_lost(error)
            self._wake()
            self._arm_keepalive()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _arm_keepalive(self) -> None:
        if self._keepalive is not None:
            self._keepalive.cancel()
            self._keepalive = None
        due = self.core.keepalive_at
        if due is not None and self._loop is not None:
            self._keepalive = self._loop.call_later(max(0.0, due - time.monotonic()), self._keep_alive)

    def _keep_alive(self) -> None:
        self.core.begin_keepalive()
        self.flush()
        self._arm_keepalive()
