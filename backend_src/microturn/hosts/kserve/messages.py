"""Requests of the wire contract (client/PROTOCOL.md) become turns, and their answers responses."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from microturn.errors import InvalidArgument, MicroturnError
from microturn.hosts.answers import Answer, is_last, output_tensors
from microturn.hosts.kserve.envelope import MODEL_NAME, new_response, refusal_of, session_of
from microturn.hosts.requests import turn_request
from microturn.sessions.turn import TurnRequest, TurnSink
from microturn.settings import TENANT_HEADER

_MAX_DIMS = 8
# Parameters that are no options: the sequence's are read apart, the others are Triton's own.
_NO_OPTIONS, _NO_OPTION_PREFIXES = ("priority", "timeout", "headers"), ("sequence_", "triton_")
_DATATYPES = {"input_ids": "INT32", "text_input": "BYTES", "input_embeds": "FP32"}
_TYPES = {"INT32": np.dtype("<i4"), "FP32": np.dtype("<f4")}
_NAMES_OF_TYPES = {"i": "INT32", "f": "FP32", "O": "BYTES"}


def read_request(message: Any, sink: TurnSink, tenant: str | None, arrived_s: float) -> TurnRequest:
    """A `ModelInferRequest` as a turn's request; what is wrong with its options or input becomes a refusal.

    Args:
        message: the request.
        sink: where the answer goes.
        tenant: what a trusted proxy says of the caller.
        arrived_s: when it arrived, by the engine's clock.

    Raises:
        InvalidArgument: it is for another model, or for no session.
    """
    if message.model_name != MODEL_NAME:
        raise InvalidArgument(f"Request for unknown model: '{message.model_name[:100]}' is not found")
    return turn_request(
        session_of(message),
        start=_flag(message, "sequence_start"),
        end=_flag(message, "sequence_end"),
        parameters=lambda: _options_of(message, tenant),
        tensors=lambda: _tensors_of(message),
        sink=sink,
        arrived_s=arrived_s,
    )


def response_to(request_id: str, answer: Answer) -> bytes:
    """A `ModelStreamInferResponse`, serialized."""
    if isinstance(answer, MicroturnError):
        return refusal_of(request_id, answer)
    message = new_response(request_id, is_last=is_last(answer))
    response = message.infer_response
    for name, array in output_tensors(answer).items():
        datatype = _NAMES_OF_TYPES[array.dtype.kind]
        response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        response.raw_output_contents.append(_bytes_of(array))
    return bytes(message.SerializeToString())


def _flag(message: Any, name: str) -> bool:
    said = message.parameters.get(name)
    if said is not None and said.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidArgument(f"the parameter {name} is a bool_param")
    return said is not None and bool(said.bool_param)


def _options_of(message: Any, tenant: str | None) -> str:
    options = {} if tenant is None else {TENANT_HEADER: tenant}
    for name, value in message.parameters.items():
        if name in _NO_OPTIONS or name.startswith(_NO_OPTION_PREFIXES):
            continue
        kind = value.WhichOneof("parameter_choice")
        if name == TENANT_HEADER:
            raise InvalidArgument(
                f"'{name}' is no parameter: set max_sessions_per_tenant, and have a proxy send it as a header"
                if tenant is None
                else f"'{name}' came twice"
            )
        if kind is None:
            raise InvalidArgument(f"option '{name}' has no value")
        options[name] = getattr(value, kind)
    return json.dumps(options)


def _tensors_of(message: Any) -> dict[str, np.ndarray[Any, Any]]:
    if len(message.inputs) != len(message.raw_input_contents):
        raise InvalidArgument(f"{len(message.inputs)} inputs have {len(message.raw_input_contents)} raw_input_contents")
    tensors = {}
    for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True):
        datatype = _DATATYPES.get(tensor.name)
        if datatype is None:
            raise InvalidArgument(f"unexpected inference input '{tensor.name[:100]}': {', '.join(_DATATYPES)} are read")
        if tensor.name in tensors:
            raise InvalidArgument(f"input '{tensor.name}' came twice")
        if tensor.datatype != datatype:
            raise InvalidArgument(f"{tensor.name} has data-type {tensor.datatype[:20]}: its data-type is {datatype}")
        shape = tuple(tensor.shape)
        if len(shape) > _MAX_DIMS or any(length < 0 for length in shape):
            raise InvalidArgument(f"unexpected shape for input '{tensor.name}': {list(shape[:_MAX_DIMS])}")
        texts = _texts_in(content) if datatype == "BYTES" else None
        size = len(content) // 4 if texts is None else len(texts)
        if math.prod(shape) != size or (texts is None and len(content) % 4):
            raise InvalidArgument(f"{tensor.name} has shape {list(shape)} and {len(content)} bytes: byte size mismatch")
        array = np.frombuffer(content, _TYPES[datatype]) if texts is None else np.array(texts, np.object_)
        try:
            tensors[tensor.name] = array.reshape(shape)
        except ValueError as error:  # no elements, and yet too large
            raise InvalidArgument(f"unexpected shape for input '{tensor.name}': {error}") from error
    return tensors


def _texts_in(content: bytes) -> list[bytes]:
    """The elements of a tensor of bytes: each behind its length in four bytes."""
    texts, at = [], 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "little")
        texts.append(content[at + 4 : at + 4 + length])
        at += 4 + length
        if at > len(content):
            raise InvalidArgument(f"text_input has incomplete string data: {at - len(content)} bytes are missing")
    return texts


def _bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.kind != "O":
        return array.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel())
