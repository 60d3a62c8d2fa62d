"""KServe's gRPC service as far as sessions need it, in front of whatever computes their turns.

| call | answer |
| --- | --- |
| `ModelStreamInfer` | the turns of a session |
| `ModelConfig` | what clients read before they open a session |
| `ServerLive`, `ServerReady`, `ModelReady` | whether turns are taken |

Messages pass as bytes: an edge reads of a request its session and its id, and of an answer nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, Self

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from microturn.errors import MicroturnError
from microturn.hosts.kserve.envelope import MODEL_NAME, refusal_of, session_of
from microturn.settings import TENANT_HEADER

log = logging.getLogger(__name__)

ROUTE_HEADER = "x-session-route"

_SERVICE = "inference.GRPCInferenceService"
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    # A client that froze is noticed in two seconds, and clients may ping an idle stream every second.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)

# Turns of a stream whose answers are not taken yet; behind so many no more are read. Each costs an edge 12 KB.
_MAX_UNTAKEN = 256


class StreamBrokenError(Exception):
    """What computes the turns of a stream has gone: what became of those that are not answered is not known."""


class TurnResponses(Protocol):
    """The responses to one turn, serialized."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> bytes:
        """The next one.

        Raises:
            MicroturnError: the turn has failed.
            StreamBrokenError: see there.
        """

    async def aclose(self) -> None:
        """The turn's client has gone before the last of them."""


class Turns(Protocol):
    """Where the turns of one stream go.

    Attributes:
        route: what the client says of later streams of its session, so that they come here; None is nothing.
    """

    route: str | None

    async def begin(self, request: bytes, message: Any) -> TurnResponses:
        """Hands a turn on, and returns when it has its place behind those of its session that were begun before.

        Args:
            request: a `ModelInferRequest`.
            message: the same, read.

        Raises:
            MicroturnError: the turn is refused.
            StreamBrokenError: see there.
        """

    async def watch(self) -> None:
        """Waits until what computes the turns has gone.

        Raises:
            StreamBrokenError: it has gone.
        """


class Front(Protocol):
    """What stands behind the service."""

    async def open(self, route: str | None, tenant: str | None) -> Turns:
        """A stream has come.

        Args:
            route: where its session was, if the client says so.
            tenant: what a trusted proxy says of the caller.

        Raises:
            StreamBrokenError: nobody takes it now.
        """

    async def model_config(self) -> bytes:
        """A `ModelConfigResponse`.

        Raises:
            StreamBrokenError: nobody can tell now.
        """

    @property
    def is_ready(self) -> bool:
        """Whether turns are taken."""


def grpc_server(front: Front, address: str) -> grpc.aio.Server:
    """A server on an event loop, not yet started.

    Raises:
        RuntimeError: it cannot listen there.
    """
    service = _Service(front)
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, service.handlers()),))
    server.add_insecure_port(address)
    return server


class _Service:
    def __init__(self, front: Front) -> None:
        self._front = front

    def handlers(self) -> Mapping[str, grpc.RpcMethodHandler]:
        return {
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream),
            "ModelConfig": _unary(self._config),
            "ServerLive": _unary(self._server_live),
            "ServerReady": _unary(self._server_ready),
            "ModelReady": _unary(self._model_ready),
        }

    async def _config(self, request: bytes, context: Any) -> bytes:
        message = service_pb2.ModelConfigRequest.FromString(request)
        if message.name != MODEL_NAME:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{message.name}' is not found")
        try:
            return await self._front.model_config()
        except StreamBrokenError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise  # it does not return

    async def _server_live(self, request: bytes, context: Any) -> bytes:
        return bytes(service_pb2.ServerLiveResponse(live=True).SerializeToString())

    async def _server_ready(self, request: bytes, context: Any) -> bytes:
        return bytes(service_pb2.ServerReadyResponse(ready=self._front.is_ready).SerializeToString())

    async def _model_ready(self, request: bytes, context: Any) -> bytes:
        message = service_pb2.ModelReadyRequest.FromString(request)
        is_ready = self._front.is_ready and message.name == MODEL_NAME
        return bytes(service_pb2.ModelReadyResponse(ready=is_ready).SerializeToString())

    async def _stream(self, _requests: Any, context: Any) -> None:
        ending: tuple[grpc.StatusCode, str] | None = None
        try:
            headers = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
            turns = await self._front.open(headers.get(ROUTE_HEADER), headers.get(TENANT_HEADER))
            await context.send_initial_metadata(() if turns.route is None else ((ROUTE_HEADER, turns.route),))
            await _Exchange(turns, context).run()
        except* StreamBrokenError as broken:
            ending = grpc.StatusCode.UNAVAILABLE, str(broken.exceptions[0])
        except* DecodeError as wrong:
            ending = grpc.StatusCode.INVALID_ARGUMENT, str(wrong.exceptions[0])
        except* grpc.aio.BaseError as gone:
            log.debug("a client has gone: %s", gone.exceptions[0])
        if ending is not None:
            await context.abort(*ending)  # raises


class _Exchange:
    """The requests and answers of one stream."""

    def __init__(self, turns: Turns, context: Any) -> None:
        self._turns = turns
        self._context = context
        self._writing = asyncio.Lock()
        self._room = asyncio.Semaphore(_MAX_UNTAKEN)
        # Of each session the answering of its last turn: answers come in the order of their turns.
        self._last: dict[int | str, asyncio.Task[None]] = {}
        self._open: set[TurnResponses] = set()

    async def run(self) -> None:
        """Until the client has said all, and all is answered."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._turns.watch())
                while (request := await self._read()) is not grpc.aio.EOF:
                    await self._begin(request, tasks)
                if self._last:
                    await asyncio.wait(self._last.values())
                watching.cancel()
        finally:
            for responses in list(self._open):  # a task that is cancelled before it begins closes nothing
                await responses.aclose()

    async def _read(self) -> Any:
        async with self._room:  # where there is room for one more
            return await self._context.read()

    async def _begin(self, request: bytes, tasks: asyncio.TaskGroup) -> None:
        message = service_pb2.ModelInferRequest.FromString(request)
        try:
            session_id = session_of(message)
            responses = await self._turns.begin(request, message)
        except MicroturnError as error:
            await self._write(refusal_of(message.id, error))
            return
        self._open.add(responses)
        task = tasks.create_task(self._answer(message.id, responses, self._last.get(session_id)))
        self._last[session_id] = task
        task.add_done_callback(lambda done: self._forget(session_id, done))

    async def _answer(self, request_id: str, responses: TurnResponses, before: asyncio.Task[None] | None) -> None:
        async with self._room:
            if before is not None:
                await asyncio.wait([before])
            try:
                async for response in responses:
                    await self._write(response)
            except MicroturnError as error:
                await self._write(refusal_of(request_id, error))
            self._open.discard(responses)

    async def _write(self, response: bytes) -> None:
        async with self._writing:
            await self._context.write(response)

    def _forget(self, session_id: int | str, task: asyncio.Task[None]) -> None:
        if self._last.get(session_id) is task:
            del self._last[session_id]


def _unary(behaviour: Callable[[bytes, Any], Awaitable[bytes]]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(behaviour)
