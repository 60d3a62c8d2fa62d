"""A gRPC stream without the client library: sends any request, right or wrong, and collects what comes back."""

from __future__ import annotations

import json
import queue
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

_TIMEOUT_S = 60


@dataclass
class Answer:
    """All that came back for one request."""

    error: str | None = None
    token_ids: list[int] = field(default_factory=list)
    position: int | None = None
    text: str = ""
    status: dict[str, Any] | None = None

    def take(self, response: service_pb2.ModelStreamInferResponse) -> bool:
        """Takes a response in; says whether it was the last. `position` is that of the first token of all."""
        if response.error_message:
            self.error = response.error_message
            return True
        result = response.infer_response
        for output, content in zip(result.outputs, result.raw_output_contents, strict=True):
            match output.name:
                case "output_ids":
                    self.token_ids += np.frombuffer(content, np.int32).tolist()
                case "output_position":
                    position = int.from_bytes(content, "little", signed=True)
                    self.position = position if self.position is None else self.position
                case "text_output":
                    self.text += content[4:].decode()
                case "status":
                    self.status = json.loads(content[4:])
        return bool(result.parameters["triton_final_response"].bool_param)

    @property
    def code(self) -> str | None:
        """The error's code, or None when there was none."""
        return None if self.error is None else self.error.split(":")[0]


class RawStream:
    """One ModelStreamInfer call; requests are answered one after the other.

    Args:
        address: of the server.
        headers: sent with the call.
    """

    def __init__(self, address: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._channel = open_channel(address)
        self._requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._responses = stub.ModelStreamInfer(iter(self._requests.get, None), metadata=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.put(None)
        self._responses.cancel()
        self._channel.close()

    def ask(
        self,
        session_id: int | str,
        *,
        start: bool = False,
        end: bool = False,
        options: dict[str, Any] | None = None,
        timeout_s: float = _TIMEOUT_S,
        **inputs: Any,
    ) -> Answer:
        """Sends a turn and waits for its end; inputs are named arrays, or bytes for `text_input`."""
        self._requests.put(turn_request(session_id, start=start, end=end, options=options, **inputs))
        answer = Answer()
        for response in self._replies(timeout_s):
            if answer.take(response):
                return answer
        raise AssertionError("the stream ended without an answer")

    def _replies(self, timeout_s: float) -> Iterator[service_pb2.ModelStreamInferResponse]:
        while True:
            # A stream that never answers must fail the test, not hang it.
            yield _next_within(self._responses, timeout_s)


def _next_within(call: Any, timeout_s: float) -> Any:
    import threading

    timer = threading.Timer(timeout_s, call.cancel)
    timer.start()
    try:
        return next(call)
    finally:
        timer.cancel()


def open_channel(address: str) -> grpc.Channel:
    """A connection of its own, which takes messages of any size: a request of 10 MB must be answered, too."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    return grpc.insecure_channel(address, options=[*options, ("grpc.use_local_subchannel_pool", 1)])


def turn_request(
    session_id: int | str,
    *,
    start: bool = False,
    end: bool = False,
    options: dict[str, Any] | None = None,
    **inputs: Any,
) -> service_pb2.ModelInferRequest:
    """A turn with an id of its own; inputs are named arrays, or bytes for `text_input`."""
    request = service_pb2.ModelInferRequest(model_name="streaming_llm", id=secrets.token_hex(4))
    set_parameter(request, "sequence_id", session_id)
    set_parameter(request, "sequence_start", start)
    set_parameter(request, "sequence_end", end)
    for name, value in (options or {}).items():
        set_parameter(request, name, value)
    for name, value in inputs.items():
        add_input(request, name, value)
    return request


def set_parameter(request: service_pb2.ModelInferRequest, name: str, value: Any) -> None:
    """Sets a parameter, or sets it anew."""
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    setattr(request.parameters[name], kinds[type(value)], value)


def add_input(request: service_pb2.ModelInferRequest, name: str, value: Any) -> None:
    """Adds an array, or one string of bytes."""
    if isinstance(value, bytes):
        array = np.array([[value]], np.object_)
        request.inputs.add(name=name, datatype="BYTES", shape=array.shape)
        request.raw_input_contents.append(serialize_byte_tensor(array).item())
    else:
        datatype = {"int32": "INT32", "float32": "FP32", "int64": "INT64"}[value.dtype.name]
        request.inputs.add(name=name, datatype=datatype, shape=value.shape)
        request.raw_input_contents.append(value.tobytes())


def ids(*token_ids: int) -> np.ndarray:
    """`input_ids` as they travel."""
    return np.array([token_ids], np.int32)
