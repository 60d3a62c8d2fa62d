"""Messages as the server writes them, and a real gRPC server on loopback whose answers a test scripts."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

Message = service_pb2.ModelStreamInferResponse
Request = service_pb2.ModelInferRequest


def status(**fields) -> dict:
    """A status of the contract, with other values where a test gives them."""
    return {
        "finish_reason": "length",
        "stop_reason": None,
        "turn": 0,
        "context_len": 7,
        "kept_len": 7,
        "usage": {"input_tokens": 3, "output_tokens": 4, "computed_tokens": 6, "cached_tokens": 0},
        "timing_ms": {"queue": 0.1, "restore": 0.0, "prefill": 4.5, "decode": 20.0, "total": 24.6},
        "expires_in_s": 60.0,
        "seed": 1234,
    } | fields


def message(
    request_id: str,
    *,
    text: bytes = b"",
    ids: tuple[int, ...] = (),
    position: int = 0,
    end: dict | bytes | None = None,
    is_final: bool | None = None,
    logprobs: tuple[float, ...] = (),
    top: tuple[tuple[tuple[int, float], ...], ...] = (),
    appended_ids: tuple[int, ...] | None = None,
) -> Message:
    """A response with the outputs that are given."""
    result = Message()
    response = result.infer_response
    response.id = request_id
    response.parameters["triton_final_response"].bool_param = end is not None if is_final is None else is_final

    def add(name: str, datatype: str, shape: list[int], data: bytes) -> None:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(data)

    def add_bytes(name: str, data: bytes) -> None:
        add(name, "BYTES", [1, 1], len(data).to_bytes(4, "little") + data)

    if ids:
        add("output_ids", "INT32", [1, len(ids)], np.array(ids, "<i4").tobytes())
        add("output_position", "INT32", [1, 1], np.array([position], "<i4").tobytes())
    if text:
        add_bytes("text_output", text)
    if logprobs:
        add("logprobs", "FP32", [1, len(logprobs)], np.array(logprobs, "<f4").tobytes())
    if top:
        shape = [1, len(top), len(top[0])]
        add("top_ids", "INT32", shape, np.array([[pair[0] for pair in of_id] for of_id in top], "<i4").tobytes())
        add("top_logprobs", "FP32", shape, np.array([[pair[1] for pair in of_id] for of_id in top], "<f4").tobytes())
    if appended_ids is not None:
        add("appended_ids", "INT32", [1, len(appended_ids)], np.array(appended_ids, "<i4").tobytes())
    if end is not None:
        add_bytes("status", end if isinstance(end, bytes) else json.dumps(end).encode())
    return result


def error(request_id: str, text: str) -> Message:
    """An error of one turn."""
    result = Message(error_message=text)
    result.infer_response.id = request_id
    return result


def option(request: Request, name: str) -> object:
    """The value of a request's parameter, or None."""
    if name not in request.parameters:
        return None
    parameter = request.parameters[name]
    return getattr(parameter, parameter.WhichOneof("parameter_choice"))


def flags(request: Request) -> tuple[bool, bool]:
    """Whether a request is START, and whether it is END."""
    return bool(option(request, "sequence_start")), bool(option(request, "sequence_end"))


@pytest.fixture(scope="session")
def wire() -> SimpleNamespace:
    return SimpleNamespace(status=status, message=message, error=error, option=option, flags=flags)


Script = Callable[[Request, grpc.ServicerContext], Iterator[Message] | None]


class StreamEndedError(Exception):
    """Raised by a script to end the stream in peace."""


class ScriptedServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers a turn of n ids with max_tokens tokens that count on, each in a response of its own.

    Attributes:
        requests: what came, in order.
        metadata: of each stream.
        script: replaces the answer to a request; None leaves it.
        num_ended_streams: how many streams are over.
        is_ready: what it says when it is asked.
        ready_metadata: of each such question.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.metadata: list[dict[str, str]] = []
        self.script: Script = lambda _request, _context: None
        self.num_ended_streams = 0
        self.is_ready = True
        self.ready_metadata: list[dict[str, str]] = []
        self.expires_in_s = 60.0
        self._context_lens: dict[object, int] = {}
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self.address = ""

    def ModelStreamInfer(self, request_iterator, context):  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            for request in request_iterator:
                with self._lock:
                    self.requests.append(request)
                scripted = self.script(request, context)
                yield from self.answer(request) if scripted is None else scripted
        except StreamEndedError:
            return
        finally:
            with self._lock:
                self.num_ended_streams += 1

    def ModelReady(self, request, context):  # noqa: N802
        self.ready_metadata.append(dict(context.invocation_metadata()))
        return service_pb2.ModelReadyResponse(ready=self.is_ready and request.name == "streaming_llm")

    def ModelConfig(self, request, context):  # noqa: N802
        response = service_pb2.ModelConfigResponse()
        response.config.parameters["protocol_version"].string_value = "1"
        return response

    def answer(self, request: Request) -> Iterator[Message]:
        """What the contract says for a turn of ids."""
        session_id = option(request, "sequence_id")
        if option(request, "sequence_start"):
            self._context_lens[session_id] = 0
        if session_id not in self._context_lens:
            yield error(request.id, f"NOT_FOUND: no session '{session_id}' is here: open one with START")
            return
        rewind_to = option(request, "rewind_to")
        if rewind_to is not None:
            self._context_lens[session_id] = min(self._context_lens[session_id], int(rewind_to))
        self._context_lens[session_id] += request.inputs[0].shape[1]
        num_tokens = int(option(request, "max_tokens") or 0)
        for number in range(num_tokens - 1):
            yield message(request.id, ids=(number,), text=b" %d" % number, position=self._advance(session_id))
        last = ()
        position = self._context_lens[session_id]
        if num_tokens:
            last = (num_tokens - 1,)
            self._advance(session_id)
        is_end = bool(option(request, "sequence_end"))
        reason = "length" if num_tokens else "closed" if is_end else "append"
        context_len = self._context_lens.pop(session_id) if is_end else self._context_lens[session_id]
        end = status(finish_reason=reason, context_len=context_len, expires_in_s=self.expires_in_s)
        yield message(request.id, ids=last, text=b" %d" % last if last else b"", position=position, end=end)

    def flags(self) -> list[tuple[bool, bool]]:
        """Of each request that came, whether it is START and whether it is END."""
        return [flags(request) for request in self.requests]

    def end_stream(self) -> None:
        """A script's way to end the stream as if all was well."""
        raise StreamEndedError

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        """Breaks every stream."""
        self._server.stop(grace=None).wait()

    def _advance(self, session_id: object) -> int:
        self._context_lens[session_id] += 1
        return self._context_lens[session_id] - 1


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    server.start()
    yield server
    server.stop()
