"""KServe's service over gRPC, in front of turns that a test answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn.errors import InternalError, InvalidArgument
from microturn.hosts.kserve.messages import response_to
from microturn.hosts.kserve.service import ROUTE_HEADER, StreamBrokenError, grpc_server
from microturn.sessions.turn import Status, TurnOutput
from microturn.settings import TENANT_HEADER
from support.raw import ids, turn_request

TIMEOUT_S = 10
END = TurnOutput(status=Status("append", None, 0, 3, 3, {}, {}, 60.0, 1))


class Responses:
    """A turn's, which a test puts: a `TurnOutput`, or an exception to be raised."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.put: asyncio.Queue[TurnOutput | Exception | None] = asyncio.Queue()
        self.is_closed = False

    def end(self) -> None:
        self.put.put_nowait(END)
        self.put.put_nowait(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        answer = await self.put.get()
        if answer is None:
            raise StopAsyncIteration
        if isinstance(answer, Exception):
            raise answer
        return response_to(self.request_id, answer)

    async def aclose(self) -> None:
        self.is_closed = True


class Front:
    """A `Front` and its `Turns` in one.

    Attributes:
        begun: the turns that came, by their id.
        refusal: what the next turn or stream is told.
        gone: what computes the turns.
        ends_at_once: whether each turn is answered when it comes.
    """

    def __init__(self) -> None:
        self.route: str | None = "here"
        self.is_ready = True
        self.opened: list[tuple[str | None, str | None]] = []
        self.begun: dict[str, Responses] = {}
        self.refusal: Exception | None = None
        self.gone = asyncio.Event()
        self.ends_at_once = False

    async def open(self, route: str | None, tenant: str | None) -> Self:
        self.opened.append((route, tenant))
        if isinstance(self.refusal, StreamBrokenError):
            raise self.refusal
        return self

    async def model_config(self) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        return service_pb2.ModelConfigResponse().SerializeToString()

    async def begin(self, request: bytes, message: Any) -> Responses:
        assert service_pb2.ModelInferRequest.FromString(request) == message
        if self.refusal is not None:
            raise self.refusal
        responses = self.begun[message.id] = Responses(message.id)
        if self.ends_at_once:
            responses.end()
        return responses

    async def watch(self) -> None:
        await self.gone.wait()
        raise StreamBrokenError("it has gone")


@pytest.fixture
async def front() -> Front:
    return Front()


@pytest.fixture
async def channel(front: Front) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc_server(front, "127.0.0.1:0")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.fixture
def call(channel: grpc.aio.Channel) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=TIMEOUT_S)


async def send(call: Any, session_id: str = "session") -> str:
    request = turn_request(session_id, input_ids=ids(5))
    await call.write(request)
    return request.id


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def test_turns_of_a_session_are_answered_in_their_order(front: Front, call: Any) -> None:
    first, second, other = await send(call), await send(call), await send(call, "other")
    await until(lambda: len(front.begun) == 3)
    for request_id in (other, second):
        front.begun[request_id].end()
    assert (await call.read()).infer_response.id == other
    front.begun[first].end()
    assert [(await call.read()).infer_response.id for _ in range(2)] == [first, second]


async def test_who_has_said_all_hears_all(front: Front, call: Any) -> None:
    request_ids = [await send(call) for _ in range(3)]
    await call.done_writing()
    await until(lambda: len(front.begun) == 3)
    for responses in front.begun.values():
        responses.end()
    assert [response.infer_response.id async for response in call] == request_ids
    assert (await call.code()) is grpc.StatusCode.OK


async def test_a_stream_has_the_word_for_where_it_went(front: Front, channel: grpc.aio.Channel) -> None:
    headers = ((ROUTE_HEADER, "there"), (TENANT_HEADER, "acme"))
    call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(metadata=headers, timeout=TIMEOUT_S)
    assert dict(await call.initial_metadata())[ROUTE_HEADER] == "here"
    assert front.opened == [("there", "acme")]


async def test_a_refused_turn_is_told_so_and_the_stream_goes_on(front: Front, call: Any) -> None:
    front.refusal = InvalidArgument("no")
    request_id = await send(call)
    refused = await call.read()
    assert (refused.infer_response.id, refused.error_message) == (request_id, "INVALID_ARGUMENT: no")
    front.refusal, front.ends_at_once = None, True
    request_id = await send(call)
    assert (await call.read()).infer_response.id == request_id


async def test_a_turn_that_fails_in_its_answer_is_told_so_and_the_stream_goes_on(front: Front, call: Any) -> None:
    """It ended the stream as UNKNOWN, 'unhandled errors in a TaskGroup'."""
    first, second = await send(call), await send(call)
    await until(lambda: len(front.begun) == 2)
    front.begun[first].put.put_nowait(InternalError("failed"))
    front.begun[second].end()
    failed = await call.read()
    assert (failed.infer_response.id, failed.error_message) == (first, "INTERNAL: failed")
    assert (await call.read()).infer_response.id == second


async def test_a_stream_ends_with_what_computes_its_turns(
    front: Front, call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = await send(call)
    await send(call)
    await until(lambda: len(front.begun) == 2)
    front.begun[first].put.put_nowait(TurnOutput(token_ids=(5,)))
    await call.read()
    front.gone.set()
    assert await status_of(call) == (grpc.StatusCode.UNAVAILABLE, "it has gone")
    await until(lambda: all(responses.is_closed for responses in front.begun.values()))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_stream_that_nobody_takes_is_unavailable(front: Front, call: Any) -> None:
    front.refusal = StreamBrokenError("nobody")
    assert await status_of(call) == (grpc.StatusCode.UNAVAILABLE, "nobody")


async def test_all_turns_of_a_client_that_leaves_are_closed(
    front: Front, call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        await send(call)
    await until(lambda: len(front.begun) == 3)
    call.cancel()
    await until(lambda: all(responses.is_closed for responses in front.begun.values()))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_leaves_in_an_answer_is_no_fault(
    front: Front, channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written to it left the handler as an error: gRPC logged tracebacks of 30 lines."""
    for _ in range(20):
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=TIMEOUT_S)
        request_ids = [await send(call) for _ in range(2)]
        await until(lambda: request_ids[1] in front.begun)  # noqa: B023
        for responses in map(front.begun.__getitem__, request_ids):
            for _ in range(200):
                responses.put.put_nowait(TurnOutput(token_ids=(5,)))
        await call.read()
        call.cancel()
        await until(lambda: all(responses.is_closed for responses in front.begun.values()))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_message_that_does_not_parse_ends_its_stream(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    """Its client was told UNKNOWN, 'unhandled errors in a TaskGroup', and the log had a traceback."""
    call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(timeout=TIMEOUT_S)
    await call.write(b"\xff\xff\xff")
    assert (await call.code()) is grpc.StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_who_takes_no_answer_is_not_read_for_ever(front: Front, call: Any) -> None:
    """Each keep-alive whose answer was not read took 12 KB of an edge, without bound: 12,000 were 116 MB."""

    async def flood() -> None:
        for _ in range(1000):
            await send(call)

    flooding = asyncio.create_task(flood())
    await until(lambda: len(front.begun) >= 256)
    await asyncio.sleep(0.2)
    assert len(front.begun) <= 257
    front.ends_at_once = True
    for responses in front.begun.values():
        responses.end()
    for _ in range(1000):
        await call.read()
    await flooding


async def test_the_config_and_readiness_are_the_fronts(front: Front, channel: grpc.aio.Channel) -> None:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    await stub.ModelConfig(service_pb2.ModelConfigRequest(name="streaming_llm"))
    assert (await stub.ModelReady(service_pb2.ModelReadyRequest(name="streaming_llm"))).ready
    assert not (await stub.ModelReady(service_pb2.ModelReadyRequest(name="another"))).ready
    front.is_ready, front.refusal = False, StreamBrokenError("nobody")
    assert not (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
    assert (await stub.ServerLive(service_pb2.ServerLiveRequest())).live
    for name, code in (("another", grpc.StatusCode.NOT_FOUND), ("streaming_llm", grpc.StatusCode.UNAVAILABLE)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelConfig(service_pb2.ModelConfigRequest(name=name))
        assert refused.value.code() is code
