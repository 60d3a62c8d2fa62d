"""Reads requests and writes responses, as a server does. Knows the wire; knows no sessions."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from microturn_client._messages_pb2 import ModelInferRequest, ModelStreamInferResponse
from microturn_client._wire import SessionId

# Options that say how a turn is delivered; one that is sent again may say them differently.
_DELIVERY = frozenset({"session_key", "resume", "turn", "deadline_ms", "traceparent"})
_NOT_OPTIONS = ("sequence_", "triton_")


@dataclass
class FakeRequest:
    """One turn as it came.

    Attributes:
        input_ids: None where the input is text or embeddings.
        num_embeds: embeddings in the input.
    """

    id: str
    session_id: SessionId
    start: bool
    end: bool
    options: dict[str, Any]
    input_ids: list[int] | None = None
    text: str | None = None
    num_embeds: int = 0
    content: tuple[object, ...] = field(default=())

    @property
    def is_empty(self) -> bool:
        return not self.input_ids and not self.text and not self.num_embeds


def read_request(request: ModelInferRequest) -> FakeRequest:
    """A request of the contract."""
    values = {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in request.parameters.items()}
    options = {name: value for name, value in values.items() if not name.startswith(_NOT_OPTIONS)}
    tensor, data = request.inputs[0], request.raw_input_contents[0]
    said = tuple(sorted((name, str(value)) for name, value in options.items() if name not in _DELIVERY))
    read = FakeRequest(
        id=request.id,
        session_id=values["sequence_id"],
        start=bool(values.get("sequence_start")),
        end=bool(values.get("sequence_end")),
        options=options,
        content=(tensor.name, data, said, bool(values.get("sequence_end"))),
    )
    match tensor.name:
        case "text_input":
            read.text = data[4:].decode()
        case "input_embeds":
            read.num_embeds = tensor.shape[1]
        case _:
            read.input_ids = array("i", data).tolist()
    return read


def error(request_id: str, text: str) -> ModelStreamInferResponse:
    """The error of one turn: ``CODE: sentence``."""
    message = ModelStreamInferResponse(error_message=text)
    message.infer_response.id = request_id
    return message


def answer(
    request_id: str,
    *,
    token_ids: Sequence[int] = (),
    position: int = 0,
    text: str = "",
    status: Mapping[str, object] | None = None,
    appended_ids: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    top: Sequence[Sequence[tuple[int, float]]] = (),
) -> ModelStreamInferResponse:
    """A response; one with a status is the last."""
    message = ModelStreamInferResponse()
    response = message.infer_response
    response.id = request_id
    response.parameters["triton_final_response"].bool_param = status is not None

    def add(name: str, datatype: str, shape: list[int], data: bytes) -> None:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(data)

    if token_ids:
        add("output_ids", "INT32", [1, len(token_ids)], array("i", token_ids).tobytes())
        add("output_position", "INT32", [1, 1], array("i", [position]).tobytes())
        if logprobs is not None:
            add("logprobs", "FP32", [1, len(logprobs)], array("f", logprobs).tobytes())
    if top:
        pairs = [pair for of_token in top for pair in of_token]
        shape = [1, len(top), len(top[0])]
        add("top_ids", "INT32", shape, array("i", [token_id for token_id, _ in pairs]).tobytes())
        add("top_logprobs", "FP32", shape, array("f", [logprob for _, logprob in pairs]).tobytes())
    if text:
        add("text_output", "BYTES", [1, 1], _bytes_of(text))
    if appended_ids is not None:
        add("appended_ids", "INT32", [1, len(appended_ids)], array("i", appended_ids).tobytes())
    if status is not None:
        add("status", "BYTES", [1, 1], _bytes_of(json.dumps(status)))
    return message


def _bytes_of(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data
