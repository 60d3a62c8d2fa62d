"""The gRPC stream of one session, for threads: writes what the core hands out, and one thread reads what comes.

``changed`` guards the core and wakes whoever waits for an event. The reader always ends by telling the core why, so
nobody waits for a thread that died. Where a stream broke, the next one is a call of its own with a reader of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from microturn_client._errors import ConnectionLost, InternalError, MicroturnError, from_grpc
from microturn_client._events import Event
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import SessionCore
from microturn_client._session_state import SessionState
from microturn_client._wire import Metadata, ModelInferRequest, read_route

# After END is answered the server ends the stream by itself; a server that does not is not waited for.
_STREAM_END_S = 1.0

OpenCall = Callable[[Metadata, Iterator[ModelInferRequest]], Any]


class _Call:
    """One gRPC call and the requests that wait to be written to it."""

    def __init__(self, open_call: OpenCall, metadata: Metadata) -> None:
        self._requests: SimpleQueue[ModelInferRequest | None] = SimpleQueue()
        self.messages = open_call(metadata, iter(self._requests.get, None))
        self.reader: threading.Thread | None = None

    def write(self, request: ModelInferRequest) -> None:
        self._requests.put(request)

    def end(self) -> None:
        """Nothing more will be written; gRPC's writer thread waits for that."""
        self._requests.put(None)


class SyncStream:
    """The streams of a session, one at a time, opened with the first request.

    Args:
        core: the session's protocol; touched with ``changed`` held.
        open_call: opens a gRPC stream with this metadata, over an iterator of requests.
        wake_at: is told when the core will have something to do.
    """

    def __init__(self, core: SessionCore, open_call: OpenCall, wake_at: Callable[[float], None]) -> None:
        self.core = core
        self.changed = threading.Condition()
        self._open_call = open_call
        self._wake_at = wake_at
        self._call: _Call | None = None

    def flush(self) -> None:
        """Writes what the core wants sent; call it with ``changed`` held, so that the order stands."""
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
        if (due := self.core.wake_at) is not None:
            self._wake_at(due)

    def next_event(self, turn: PendingTurn) -> Event | None:
        """Waits for the next event of a turn; None when the turn is over.

        Raises:
            MicroturnError: when the turn failed or its deadline passed.
        """
        with self.changed:
            while (event := turn.next_event()) is None and not turn.is_over:
                remaining_s = self.core.remaining_s(turn)
                if remaining_s <= 0:
                    self.core.time_out(turn)
                    self.flush()
                else:
                    self.changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
            return event

    def leave(self, turn: PendingTurn) -> None:
        """Gives up a turn, also for a thread that waits for its events."""
        with self.changed:
            turn.leave()
            self.flush()
            self.changed.notify_all()

    def tick(self) -> float | None:
        """Lets the core do what is due; tells when to look again, or None while nothing is foreseen."""
        with self.changed:
            self.core.tick()
            self.flush()
            self.changed.notify_all()
            return self.core.wake_at

    def close(self) -> None:
        """Ends the stream: in an orderly way when END was answered, else by force."""
        call = self._call
        if call is not None:
            call.end()
            if call.reader is not None and self.core.state is SessionState.CLOSED:
                call.reader.join(_STREAM_END_S)
        with self.changed:
            self.core.connection_lost(ConnectionLost("the session was closed"))
            self.changed.notify_all()
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
                with self.changed:
                    if call is not self._call:
                        break
                    self.core.requests.route = route or self.core.requests.route
                    self.core.receive(message)
                    self.flush()
                    self.changed.notify_all()
        except grpc.RpcError as failure:
            error = from_grpc(failure.code(), failure.details())
        except Exception as failure:
            error = InternalError(f"the client itself failed while reading: {failure!r}")
            call.messages.cancel()
        finally:
            with self.changed:
                if call is self._call:
                    self._call = None
                    self.core.connection_lost(error)
                    if (due := self.core.wake_at) is not None:
                        self._wake_at(due)
                self.changed.notify_all()
            call.end()
