"""The gRPC stream of one session, for threads: writes what the core hands out, and one thread reads what comes.

``changed`` guards the core and wakes whoever waits for an event. The reader always ends by telling the core why, so
nobody waits for a thread that died.
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
from microturn_client._session_core import SessionCore, SessionState
from microturn_client._wire import ModelInferRequest, SessionId

# After END is answered the server ends the stream by itself; a server that does not is not waited for.
_STREAM_END_S = 1.0


class SyncStream:
    """One stream, opened with the first request.

    Args:
        core: the session's protocol; touched with ``changed`` held.
        open_call: opens the gRPC stream of a session over an iterator of requests.
        on_keepalive_at: is told when the session will need a keep-alive.
    """

    def __init__(
        self,
        core: SessionCore,
        open_call: Callable[[SessionId, Iterator[ModelInferRequest]], Any],
        on_keepalive_at: Callable[[float], None],
    ) -> None:
        self.core = core
        self.changed = threading.Condition()
        self._open_call = open_call
        self._on_keepalive_at = on_keepalive_at
        self._requests: SimpleQueue[ModelInferRequest | None] = SimpleQueue()
        self._call: Any = None
        self._reader: threading.Thread | None = None

    def flush(self) -> None:
        """Writes what the core wants sent; call it with ``changed`` held, so that the order stands."""
        requests = self.core.requests_to_send()
        if requests and self._call is None:
            self._call = self._open_call(self.core.id, iter(self._requests.get, None))
            self._reader = threading.Thread(target=self._read, name=f"microturn-{self.core.id}", daemon=True)
            self._reader.start()
        for request in requests:
            self._requests.put(request)

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
                else:
                    self.changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
            return event

    def leave(self, turn: PendingTurn) -> None:
        """Gives up a turn, also for a thread that waits for its events."""
        with self.changed:
            turn.abandon()
            self.changed.notify_all()

    def close(self) -> None:
        """Ends the stream: in an orderly way when END was answered, else by force."""
        self._requests.put(None)
        if self._reader is not None and self.core.state is SessionState.CLOSED:
            self._reader.join(_STREAM_END_S)
        self.cancel()

    def cancel(self) -> None:
        """Ends the stream at once, from any thread; the reader then ends by itself."""
        if self._call is not None:
            self._call.cancel()

    def _read(self) -> None:
        error: MicroturnError = ConnectionLost("the server ended the stream")
        try:
            for message in self._call:
                with self.changed:
                    self.core.receive(message)
                    self.flush()
                    self.changed.notify_all()
                    keepalive_at = self.core.keepalive_at
                if keepalive_at is not None:
                    self._on_keepalive_at(keepalive_at)
        except grpc.RpcError as failure:
            error = from_grpc(failure.code(), failure.details())
        except Exception as failure:
            error = InternalError(f"the client itself failed while reading: {failure!r}")
            self._call.cancel()
        finally:
            with self.changed:
                self.core.connection_lost(error)
                self.changed.notify_all()
            self._requests.put(None)  # gRPC's writer thread waits there
