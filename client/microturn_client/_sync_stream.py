"""The streams of a session, for threads. The same names as in ``_aio_stream``.

One thread per stream reads what comes. The stream's lock guards the core, and
wakes the threads that wait for an event. The reader always ends by telling the core why, so nobody waits for a thread
that died. Where a stream broke, the next one is a call of its own with a reader of its own.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
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

OpenCall = Callable[[Metadata, Iterator[ModelInferRequest]], Any]
TellRef = Callable[[], Callable[[Resumed], object] | None]


class _Call:
    """One gRPC call and the requests that wait to be written to it."""

    def __init__(self, open_call: OpenCall, metadata: Metadata) -> None:
        self._requests: queue.SimpleQueue[ModelInferRequest | None] = queue.SimpleQueue()
        self.messages = open_call(metadata, iter(self._requests.get, None))
        self.reader: threading.Thread | None = None

    def write(self, request: ModelInferRequest) -> None:
        self._requests.put(request)

    def end(self) -> None:
        """Nothing more will be written; gRPC's writer thread waits for that."""
        self._requests.put(None)


class Stream:
    """The streams of a session, one at a time, opened with the first request.

    Args:
        core: the session's protocol.
        open_call: opens a gRPC stream with this metadata, over an iterator of requests.
        tell: refers to what tells the program what befell the session, as long as the session is held.
        wake_at: is told when the core will have something to do.

    Attributes:
        core: see above.
        lock: held while the core is touched, and from there to ``flush``, so that the order stands.
    """

    def __init__(self, core: SessionCore, open_call: OpenCall, tell: TellRef, wake_at: Callable[[float], None]) -> None:
        self.core = core
        self.lock = self._changed = threading.Condition()
        self._open_call = open_call
        self._tell = tell
        self._wake_at = wake_at
        self._call: _Call | None = None

    def flush(self) -> None:
        """Writes what the core wants sent, and wakes the threads that wait for an event; with ``lock`` held."""
        if not self.core.wants_stream:
            self._drop_call()
        requests = self.core.requests_to_send()
        if requests and self._call is None:
            self._call = _Call(self._open_call, self.core.requests.metadata)
            self._call.reader = threading.Thread(
                target=self._read, args=(self._call,), name=f"microturn-{self.core.id}", daemon=True
            )
            self._call.reader.start()
        for request in requests:
            assert self._call is not None
            self._call.write(request)
        for event in self.core.news.take_uncalled():
            if (tell := self._tell()) is not None:
                # In a thread of its own: it may use the session, and hold up no other.
                threading.Thread(target=tell, args=(event,), name="microturn-resumed", daemon=True).start()
        if (due := self.core.wake_at) is not None:
            self._wake_at(due)
        self._changed.notify_all()

    def next_event(self, turn: PendingTurn, until_s: float = math.inf) -> Event | None:
        """Waits for the next event of a turn, up to a monotonic time; None when the turn is over, or that has come.

        Raises:
            MicroturnError: when the turn failed or its time passed.
        """
        with self.lock:
            while (event := turn.next_event()) is None and not turn.is_over:
                remaining_s, wait_s = self.core.remaining_s(turn), until_s - time.monotonic()
                if remaining_s <= 0:
                    self.core.time_out(turn)
                    self.flush()
                elif wait_s <= 0:
                    return None
                else:
                    self._changed.wait(min(remaining_s, wait_s, threading.TIMEOUT_MAX))
            return event

    def next_of(self, turns: deque[PendingTurn]) -> Event | None:
        """Waits for the next event of turns that others are added to; None when the session takes no more.

        Raises:
            MicroturnError: when the first of them failed; it is taken out.
        """
        while (turn := self._first_of(turns)) is not None:
            if self.core.news.unread:
                return self.core.news.unread.popleft()
            try:
                if (event := self.next_event(turn)) is not None:
                    return event
            finally:
                if turn.is_spent and turns and turns[0] is turn:
                    turns.popleft()
        return None

    def _first_of(self, turns: deque[PendingTurn]) -> PendingTurn | None:
        with self.lock:
            while not turns and self.core.lifecycle.takes_turns:
                self._changed.wait()
        return turns[0] if turns else None

    def leave(self, turn: PendingTurn) -> None:
        """Gives up a turn, also for a thread that waits for its events."""
        with self.lock:
            turn.leave()
            self.flush()

    def flush_soon(self) -> None:
        """Sees to it that what was left is cut, by the timer's thread: at any moment, whatever locks are held."""
        self._wake_at(-math.inf)

    def tick(self) -> float | None:
        """Lets the core do what is due; tells when to look again, or None while nothing is foreseen."""
        with self.lock:
            try:
                self.core.tick()
                self.flush()
            except Exception as failure:
                self.core.lifecycle.lose(InternalError(f"the client itself failed when a time had come: {failure!r}"))
                self._changed.notify_all()
                return None
            return self.core.wake_at

    def close(self) -> None:
        """Ends the stream: in an orderly way when END was answered, else by force."""
        call = self._call
        if call is not None:
            call.end()
            if call.reader is not None and self.core.lifecycle.state is SessionState.CLOSED:
                call.reader.join(_STREAM_END_S)
        with self.lock:
            self.core.connection_lost(ConnectionLost("the session was closed"))
            self._changed.notify_all()
        self.cancel()

    def cancel(self) -> None:
        """Ends the stream at once, from any thread; the reader then ends by itself."""
        self._drop_call()

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.messages.cancel()

    def _read(self, call: _Call) -> None:
        error: MicroturnError = ConnectionLost("the server ended the stream")
        route: str | None = None
        is_first = True
        try:
            for message in call.messages:
                if is_first:
                    route = read_route(call.messages.initial_metadata())
                    is_first = False
                with self.lock:
                    if call is not self._call:
                        break
                    self.core.requests.route = route or self.core.requests.route
                    self.core.receive(message)
                    self.flush()
        except Exception as failure:
            error = from_failure(failure)
            call.messages.cancel()
        finally:
            with self.lock:
                if call is self._call:
                    self._call = None
                    self.core.connection_lost(error)
                    if (due := self.core.wake_at) is not None:
                        self._wake_at(due)
                self._changed.notify_all()
            call.end()
