"""The fake server as programs meet it: clients whose streams lead to it. While turns run, a thread steps them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc

from microturn_client._aio import AsyncClient
from microturn_client._messages_pb2 import ModelInferRequest, ModelStreamInferResponse
from microturn_client._model_info import Limits, ModelInfo
from microturn_client._sync import Client
from microturn_client._wire import Metadata, SessionId
from microturn_client.testing._fake_sessions import FakeSessions

# Nothing is ever sent there.
_NOWHERE = "127.0.0.1:9"


class FakeServer:
    """A server in this process. It ends with it; nothing needs to be closed.

    Attributes:
        model_fingerprint: of its model; set another one before :meth:`restart`, and another model takes its place.

    Args:
        token_s: seconds that each token takes.
        max_context: longest context in tokens.
        idle_timeout_s: silence in seconds after which a session ends that asks for nothing else.
    """

    def __init__(self, *, token_s: float = 0.0, max_context: int = 8192, idle_timeout_s: float = 60.0) -> None:
        self._token_s = token_s
        self._limits = Limits(max_context, None, FakeSessions.max_queued_turns, None, idle_timeout_s, None)
        self._sessions = FakeSessions(time.monotonic, max_context=max_context, idle_timeout_s=idle_timeout_s)
        self._calls: set[_Call] = set()
        self._lock = threading.RLock()
        self._is_down = False
        self._is_running = False

    @property
    def model_fingerprint(self) -> str:
        """See above."""
        return self._sessions.model_fingerprint

    @model_fingerprint.setter
    def model_fingerprint(self, fingerprint: str) -> None:
        self._sessions.model_fingerprint = fingerprint

    def client(self, **options: Any) -> Client:
        """A :class:`~microturn_client.Client` of this server; options as there."""
        return _FakeClient(self, **options)

    def async_client(self, **options: Any) -> AsyncClient:
        """An :class:`~microturn_client.AsyncClient` of this server; options as there."""
        return _FakeAsyncClient(self, **options)

    def context_of(self, session_id: SessionId) -> list[int]:
        """The token ids that a session has; -1 for an embedding.

        Raises:
            KeyError: no session of this id lives.
        """
        with self._lock:
            return self._sessions.context_of(session_id)

    @property
    def num_sessions(self) -> int:
        """How many sessions live."""
        with self._lock:
            return self._sessions.num_sessions

    # ---- what can befall it --------------------------------------------------------------------------------------

    def break_streams(self) -> None:
        """All streams break; the sessions live."""
        with self._lock:
            for call in list(self._calls):
                self._drop(call)
                call.finish(_broken("the stream was reset"))

    def mute_streams(self) -> None:
        """All streams that are open live on, and nothing passes them any more; the sessions live."""
        with self._lock:
            for call in list(self._calls):
                self._drop(call)

    def end_sequences(self) -> None:
        """Triton ends all sequences, as it does at an END of somebody who lacks the key; the sessions live."""
        with self._lock:
            self._sessions.forget_sequences()

    def rebuild(self) -> None:
        """The server loses all KV and inputs before the windows; the sessions live, and their next status says so."""
        with self._lock:
            self._sessions.rebuild()

    def restart(self) -> None:
        """The server dies, with all sessions, and is back at once."""
        with self._lock:
            self._sessions.forget_sessions()
        self.break_streams()

    def go_down(self) -> None:
        """The server dies, with all sessions, and takes no streams until :meth:`come_back`."""
        with self._lock:
            self._is_down = True
        self.restart()

    def come_back(self) -> None:
        """See :meth:`go_down`."""
        with self._lock:
            self._is_down = False

    # ---- for its calls -------------------------------------------------------------------------------------------

    def _open(self, call: _Call) -> None:
        with self._lock:
            if self._is_down:
                call.finish(_broken("nothing listens there"))
            else:
                self._calls.add(call)

    def _take(self, call: _Call, request: ModelInferRequest) -> None:
        with self._lock:
            if call in self._calls:
                self._sessions.take(request, call.send)
            if self._sessions.is_busy and not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="fake-server", daemon=True).start()

    def _close(self, call: _Call) -> None:
        with self._lock:
            self._drop(call)

    def _drop(self, call: _Call) -> None:
        self._calls.discard(call)
        self._sessions.drop(call.send)

    def _run(self) -> None:
        """Takes steps until no turn runs."""
        while True:
            with self._lock:
                self._sessions.step()
                if not self._sessions.is_busy:
                    self._is_running = False
                    return
            time.sleep(self._token_s)


class _Broken(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """What gRPC raises where a stream ends badly."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._status, self._details = status, details

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return self._details


def _broken(details: str) -> _Broken:
    return _Broken(grpc.StatusCode.UNAVAILABLE, details)


class _Call:
    """One stream. Messages end with the error that ends it, or with None."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        # Bound once: the sessions know a stream by it.
        self.send: Callable[[ModelStreamInferResponse], None] = self._put

    def _put(self, item: Any) -> None:
        raise NotImplementedError

    def finish(self, error: _Broken | None) -> None:
        """Nothing more comes."""
        self._put(error)

    def cancel(self) -> None:
        """The client has enough."""
        self._server._close(self)
        self.finish(_Broken(grpc.StatusCode.CANCELLED, "cancelled by the client"))


class _SyncCall(_Call):
    def __init__(self, server: FakeServer, requests: Iterator[ModelInferRequest]) -> None:
        super().__init__(server)
        self._messages: SimpleQueue[Any] = SimpleQueue()
        server._open(self)
        threading.Thread(target=self._write, args=(requests,), daemon=True).start()

    def _write(self, requests: Iterator[ModelInferRequest]) -> None:
        for request in requests:
            self._server._take(self, request)
        self._server._close(self)
        self.finish(None)

    def initial_metadata(self) -> Metadata:
        return ()

    def _put(self, item: Any) -> None:
        self._messages.put(item)

    def __iter__(self) -> Iterator[ModelStreamInferResponse]:
        while (message := self._messages.get()) is not None:
            if isinstance(message, _Broken):
                raise message
            yield message


class _AsyncCall(_Call):
    def __init__(self, server: FakeServer, requests: AsyncIterator[ModelInferRequest]) -> None:
        super().__init__(server)
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        server._open(self)
        self._writer = self._loop.create_task(self._write(requests))

    async def _write(self, requests: AsyncIterator[ModelInferRequest]) -> None:
        async for request in requests:
            self._server._take(self, request)
        self._server._close(self)
        self.finish(None)

    async def initial_metadata(self) -> Metadata:
        return ()

    def _put(self, item: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._messages.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[ModelStreamInferResponse]:
        while (message := await self._messages.get()) is not None:
            if isinstance(message, _Broken):
                raise message
            yield message


class _FakeClient(Client):
    def __init__(self, server: FakeServer, **options: Any) -> None:
        super().__init__(_NOWHERE, **options)
        self._server = server

    def _open_stream(self, metadata: Metadata, requests: Iterator[ModelInferRequest]) -> Any:
        return _SyncCall(self._server, requests)

    def model_info(self) -> ModelInfo:
        return ModelInfo(1, "fake", self._server.model_fingerprint, self._server._limits)

    def ready(self, timeout_s: float = 5.0) -> bool:
        return not self._server._is_down


class _FakeAsyncClient(AsyncClient):
    def __init__(self, server: FakeServer, **options: Any) -> None:
        super().__init__(_NOWHERE, **options)
        self._server = server

    def _open_stream(self, metadata: Metadata, requests: AsyncIterator[ModelInferRequest]) -> Any:
        return _AsyncCall(self._server, requests)

    async def model_info(self) -> ModelInfo:
        return ModelInfo(1, "fake", self._server.model_fingerprint, self._server._limits)

    async def ready(self, timeout_s: float = 5.0) -> bool:
        return not self._server._is_down
