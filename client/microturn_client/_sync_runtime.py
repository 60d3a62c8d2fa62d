"""What the client does differently for threads than for asyncio: its channel, the streams of a session, its timer.

The same names as in ``_aio_runtime``. One thread per stream reads what comes. The stream's lock guards the core, and
wakes the threads that wait for an event. The reader always ends by telling the core why, so nobody waits for a thread
that died. Where a stream broke, the next one is a call of its own with a reader of its own.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from microturn_client._beat import MAX_WAITING, Coalescer
from microturn_client._errors import ConnectionLost, InternalError, MicroturnError, from_grpc
from microturn_client._events import Event
from microturn_client._inputs import TurnInput
from microturn_client._pending_turn import PendingTurn
from microturn_client._session_core import SessionCore
from microturn_client._session_state import SessionState
from microturn_client._timer import TimerThread
from microturn_client._wire import CHANNEL_OPTIONS, Metadata, ModelInferRequest, read_route

if TYPE_CHECKING:
    from microturn_client._sync_session import Session

# After END is answered the server ends the stream by itself; a server that does not is not waited for.
_STREAM_END_S = 1.0

# How soon the thread that pulls a source notices that it is not wanted any more.
_NOTICE_S = 0.2

OpenCall = Callable[[Metadata, Iterator[ModelInferRequest]], Any]


class Connection:
    """The gRPC channel of a client, and the sessions on it, which it holds weakly.

    Attributes:
        stub: for calls of the server.

    Args:
        address: ``host:port`` of the server's gRPC endpoint.
        credentials: of the channel; without them it is plain text.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None) -> None:
        if credentials is None:
            channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self.stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._timer = TimerThread()
        self._release = weakref.finalize(self, _release, self._timer, channel)

    @property
    def is_closed(self) -> bool:
        return not self._release.alive

    def stream(self, core: SessionCore, open_call: OpenCall) -> Stream:
        """Streams for one session."""
        return Stream(core, open_call, self._timer.wake_at)

    def watch(self, session: Session) -> None:
        """Adds a session."""
        self._timer.watch(session)

    def sessions(self) -> list[Session]:
        """The sessions that the program still holds."""
        return self._timer.sessions()

    def close(self, closing: Iterable[Callable[[], object]]) -> None:
        """Closes the channel once each of ``closing`` has returned."""
        for close in closing:
            close()
        self._release()


def _release(timer: TimerThread, channel: grpc.Channel) -> None:
    timer.stop()
    channel.close()


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
        wake_at: is told when the core will have something to do.

    Attributes:
        core: see above.
        lock: held while the core is touched, and from there to ``flush``, so that the order stands.
    """

    def __init__(self, core: SessionCore, open_call: OpenCall, wake_at: Callable[[float], None]) -> None:
        self.core = core
        self.lock = self._changed = threading.Condition()
        self._open_call = open_call
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
        if (due := self.core.wake_at) is not None:
            self._wake_at(due)
        self._changed.notify_all()

    def next_event(self, turn: PendingTurn) -> Event | None:
        """Waits for the next event of a turn; None when the turn is over.

        Raises:
            MicroturnError: when the turn failed or its deadline passed.
        """
        with self.lock:
            while (event := turn.next_event()) is None and not turn.is_over:
                remaining_s = self.core.remaining_s(turn)
                if remaining_s <= 0:
                    self.core.time_out(turn)
                    self.flush()
                else:
                    self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
            return event

    def leave(self, turn: PendingTurn) -> None:
        """Gives up a turn, also for a thread that waits for its events."""
        with self.lock:
            turn.leave()
            self.flush()

    def tick(self) -> float | None:
        """Lets the core do what is due; tells when to look again, or None while nothing is foreseen."""
        with self.lock:
            self.core.tick()
            self.flush()
            return self.core.wake_at

    def close(self) -> None:
        """Ends the stream: in an orderly way when END was answered, else by force."""
        call = self._call
        if call is not None:
            call.end()
            if call.reader is not None and self.core.state is SessionState.CLOSED:
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
        except grpc.RpcError as failure:
            error = from_grpc(failure.code(), failure.details())
        except Exception as failure:
            error = InternalError(f"the client itself failed while reading: {failure!r}")
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


class Source:
    """Chunks of input that a thread pulls from an iterator; it waits while ``MAX_WAITING`` of them do."""

    def __init__(self, source: Iterator[TurnInput]) -> None:
        self._arrived: queue.Queue[TurnInput] = queue.Queue(MAX_WAITING)
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._is_left = False
        threading.Thread(target=self._pull, args=(source,), name="microturn-source", daemon=True).start()

    def wait(self, waiting: Coalescer) -> bool:
        """Waits for the next chunk, which may be put there; False when the source has ended and none is left."""
        while not (self._has_ended.is_set() and self._arrived.empty()):
            try:
                waiting.put(self._arrived.get(timeout=_NOTICE_S))
            except queue.Empty:
                continue
            return True
        return False

    def drain(self, waiting: Coalescer) -> bool:
        """Puts there what has come, as far as it may wait; says whether the source was held up."""
        is_held_up = self._arrived.full()
        while not self._arrived.empty() and len(waiting) < MAX_WAITING:
            waiting.put(self._arrived.get())
        return is_held_up

    def check(self) -> None:
        """Raises what the source raised; call it when the source has ended."""
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Pulls no more."""
        self._is_left = True

    def _pull(self, source: Iterator[TurnInput]) -> None:
        try:
            for chunk in source:
                while not self._is_left:
                    try:
                        self._arrived.put(chunk, timeout=_NOTICE_S)
                    except queue.Full:
                        continue
                    break
                if self._is_left:
                    break
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended.set()
