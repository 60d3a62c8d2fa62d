"""The streams of a session, for asyncio. ``_sync_stream`` has the same names for threads.

One task per stream reads what comes. Everything happens on one event loop, so nothing is locked. The reader always ends
by telling the core why, so no task waits for one that died. A timer wakes the core when it has something to do: keep an
idle session alive, or try again where a stream broke; each stream is a call of its own. It also wakes the task that
waits for a turn whose time has passed. What it was set for has mostly moved on when it goes off, and it is set again:
that is rarer than messages are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from typing import Any

from microturn_client._errors import ConnectionLost, InternalError, MicroturnError, from_failure
from microturn_client._events import Event, Resumed
from microturn_client._lifecycle import SessionState
from microturn_client._messages_pb2 import ModelInferRequest
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import SessionCore
from microturn_client._wire import Metadata, read_route

# After END is answered the server ends the stream by itself; a server that does not is not waited for.
_STREAM_END_S = 1.0

OpenCall = Callable[[Metadata, AsyncIterator[ModelInferRequest]], Any]
TellRef = Callable[[], Callable[[Resumed], object] | None]


class _Call:
    """One gRPC call and the requests that wait to be written to it."""

    def __init__(self, open_call: OpenCall, metadata: Metadata) -> None:
        self._requests: asyncio.Queue[ModelInferRequest | None] = asyncio.Queue()
        self.messages = open_call(metadata, self._outgoing())
        self.reader: asyncio.Task[None] | None = None

    def write(self, request: ModelInferRequest) -> None:
        self._requests.put_nowait(request)

    def end(self) -> None:
        """Nothing more will be written."""
        self._requests.put_nowait(None)

    async def _outgoing(self) -> AsyncIterator[ModelInferRequest]:
        while (request := await self._requests.get()) is not None:
            yield request


class AsyncStream:
    """The streams of a session, one at a time, opened on the loop that runs then.

    Args:
        core: the session's protocol.
        open_call: opens a gRPC stream with this metadata, over an iterator of requests.
        tell: refers to what tells the program what befell the session, as long as the session is held.

    Attributes:
        core: see above.
        lock: guards nothing here; what uses it is generated for threads as well.
    """

    def __init__(self, core: SessionCore, open_call: OpenCall, tell: TellRef) -> None:
        self.core = core
        self.lock = nullcontext()
        self._open_call = open_call
        self._tell = tell
        self._waiting: set[asyncio.Future[None]] = set()
        self._call: _Call | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = math.inf  # uvloop's handles tell it only where it is to come

    def flush(self) -> None:
        """Writes what the core wants sent, and wakes the tasks that wait for an event."""
        if not self.core.wants_stream:
            self._drop_call()
        requests = self.core.requests_to_send()
        if requests and self._call is None:
            loop = self._enter_loop()
            self._call = _Call(self._open_call, self.core.requests.metadata)
            self._call.reader = loop.create_task(self._read(self._call), name=f"microturn-{self.core.id}")
        for request in requests:
            assert self._call is not None
            self._call.write(request)
        for event in self.core.news.take_uncalled():
            if (tell := self._tell()) is not None:
                asyncio.get_running_loop().call_soon(tell, event)
        self._wake_core_in_time()
        self._wake()

    async def next_event(self, turn: PendingTurn, until_s: float = math.inf) -> Event | None:
        """Waits for the next event of a turn, up to a monotonic time; None when the turn is over, or that has come.

        Raises:
            MicroturnError: when the turn failed or its time passed.
        """
        while (event := turn.next_event()) is None and not turn.is_over:
            remaining_s, wait_s = self.core.remaining_s(turn), until_s - time.monotonic()
            if remaining_s <= 0:
                self.core.time_out(turn)
                self.flush()
            elif wait_s <= 0:
                return None
            else:
                self._enter_loop()
                self._arm_timer(min(remaining_s, wait_s))
                await self._change()
        return event

    async def next_of(self, turns: deque[PendingTurn]) -> Event | None:
        """Waits for the next event of turns that others are added to; None when the session takes no more.

        Raises:
            MicroturnError: when the first of them failed; it is taken out.
        """
        while (turn := await self._first_of(turns)) is not None:
            if self.core.news.unread:
                return self.core.news.unread.popleft()
            try:
                if (event := await self.next_event(turn)) is not None:
                    return event
            finally:
                if turn.is_spent and turns and turns[0] is turn:
                    turns.popleft()
        return None

    async def _first_of(self, turns: deque[PendingTurn]) -> PendingTurn | None:
        while not turns and self.core.lifecycle.takes_turns:
            self._enter_loop()
            await self._change()
        return turns[0] if turns else None

    def leave(self, turn: PendingTurn) -> None:
        """Gives up a turn, also for a task that waits for its events."""
        turn.leave()
        if self._loop is not None and self._loop.is_running():
            self.flush()

    def flush_soon(self) -> None:
        """Sees to it that what was left is cut; from any thread, and at any moment."""
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self.flush)

    async def close(self) -> None:
        """Ends the stream: in an orderly way when END was answered, else by force."""
        call = self._call
        try:
            if call is not None:
                call.end()
                if call.reader is not None and self.core.lifecycle.state is SessionState.CLOSED:
                    await asyncio.wait((call.reader,), timeout=_STREAM_END_S)
        finally:
            self.core.connection_lost(ConnectionLost("the session was closed"))
            self._wake()
            self.cancel()

    def cancel(self) -> None:
        """Ends the stream at once, from any thread; the reader then ends by itself."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._cancel_timer()
        self._drop_call()

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.messages.cancel()

    async def _read(self, call: _Call) -> None:
        error: MicroturnError = ConnectionLost("the server ended the stream")
        is_first = True
        try:
            async for message in call.messages:
                if call is not self._call:
                    break
                if is_first:
                    route = read_route(await call.messages.initial_metadata())
                    self.core.requests.route = route or self.core.requests.route
                    is_first = False
                self.core.receive(message)
                self.flush()
        except asyncio.CancelledError:
            error = ConnectionLost("the stream was cancelled on this side")
            raise
        except Exception as failure:
            error = from_failure(failure)
        finally:
            call.messages.cancel()
            call.end()
            if call is self._call:
                self._call = None
                self.core.connection_lost(error)
                self._wake_core_in_time()
            self._wake()

    # ---- time and change -----------------------------------------------------------------------------------------

    async def _change(self) -> None:
        """Waits until something has happened."""
        change = asyncio.get_running_loop().create_future()
        self._waiting.add(change)
        try:
            await change
        finally:
            self._waiting.discard(change)

    def _wake(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that runs now; a timer of another one will not go off."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._cancel_timer()
            self._loop = loop
            self._wake_core_in_time()
        return loop

    def _wake_core_in_time(self) -> None:
        due = self.core.wake_at
        if due is not None:
            self._arm_timer(max(0.0, due - time.monotonic()))

    def _arm_timer(self, delay_s: float) -> None:
        """Sees to it that ``_tick`` is called within so many seconds."""
        if self._loop is None or self._loop.is_closed() or delay_s == math.inf:
            return
        due = self._loop.time() + delay_s
        if self._timer is None or self._timer_due > due:
            self._cancel_timer()
            self._timer, self._timer_due = self._loop.call_at(due, self._tick), due

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        try:
            self.core.tick()
            self.flush()
        except Exception as failure:
            self.core.lifecycle.lose(InternalError(f"the client itself failed when a time had come: {failure!r}"))
            self._wake()
