"""Builds KServe requests from turns and reads responses. Keeps no state; PROTOCOL.md says what the fields mean."""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote

from microturn_client._errors import InvalidArgument, MicroturnError, ProtocolError, from_wire
from microturn_client._events import Status, TopLogprobs, parse_status
from microturn_client._inputs import InputTensor
from microturn_client._messages_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

SessionId = int | str
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

_RESERVED_NAMES = ("priority", "timeout", "headers")
_RESERVED_PREFIXES = ("sequence_", "triton_")
_INT64 = range(-(2**63), 2**63)

# A proxy with several servers behind it tells by this which one it chose; said again, it chooses the same.
_ID, _ROUTE = SESSION_METADATA = ("x-session-id", "x-session-route")


def new_session_id() -> int:
    """A random id, so that no two clients meet and no id is used twice."""
    return 1 + secrets.randbelow(2**63 - 1)


def check_session_id(session_id: SessionId) -> SessionId:
    """Refuses what Triton would drop or read as another id.

    Raises:
        InvalidArgument: unless it is an integer in [1, 2**63) or a printable text of 1 to 128 bytes (UTF-8).
    """
    if isinstance(session_id, str):
        is_valid = session_id.isprintable() and 1 <= len(session_id.encode()) <= 128
    else:
        is_valid = not isinstance(session_id, bool) and 1 <= session_id < 2**63
    if not is_valid:
        raise InvalidArgument("a session id is an integer in [1, 2**63) or a printable text of 1 to 128 bytes")
    return session_id


def stream_metadata(session_id: SessionId, route: str | None) -> Metadata:
    """The gRPC metadata of a session's stream: by these headers a proxy keeps the session with its server."""
    metadata: Metadata = ((_ID, quote(str(session_id), safe="")),)
    return metadata if route is None else (*metadata, (_ROUTE, route))


def read_route(initial_metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """What a proxy says about the server that it chose; None where there is no proxy, or its choice stands."""
    return next((str(value) for name, value in initial_metadata or () if name == _ROUTE), None)


def build_request(
    model: str, request_id: str, session_id: SessionId, tensor: InputTensor, options: Mapping[str, object]
) -> ModelInferRequest:
    """One turn as a request, neither START nor END.

    Raises:
        InvalidArgument, TypeError: as ``add_options`` does.
    """
    request = ModelInferRequest(model_name=model, id=request_id)
    # Where Triton ends a turn by itself, its last response is empty; without this it would not be sent at all.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if isinstance(session_id, str):
        request.parameters["sequence_id"].string_param = session_id
    else:
        request.parameters["sequence_id"].int64_param = session_id
    add_options(request, options)
    request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    request.raw_input_contents.append(tensor.data)
    return request


def mark_start(request: ModelInferRequest) -> None:
    """Makes the request the first of its sequence."""
    request.parameters["sequence_start"].bool_param = True


def mark_end(request: ModelInferRequest) -> None:
    """Makes the request the last of its sequence."""
    request.parameters["sequence_end"].bool_param = True


def add_options(request: ModelInferRequest, options: Mapping[str, object]) -> None:
    """Adds the options that the request does not have yet; one that is None is left out.

    Raises:
        InvalidArgument: for an option whose name Triton keeps for itself, or an integer beyond 64 bits.
        TypeError: for an option of a type that has no form on the wire.
    """
    for name, value in options.items():
        if name in _RESERVED_NAMES or name.startswith(_RESERVED_PREFIXES):
            raise InvalidArgument(f"Triton keeps the option '{name}' for itself: leave it out")
        if value is not None and name not in request.parameters:
            _set_parameter(request, name, value)


def _set_parameter(request: ModelInferRequest, name: str, value: object) -> None:
    if not isinstance(value, bool | int | float | str | list | tuple | Mapping) and hasattr(value, "item"):
        value = value.item()  # a number of numpy's
    parameter = request.parameters[name]
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        if value not in _INT64:
            raise InvalidArgument(f"option '{name}' does not fit 64 bits")
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    elif isinstance(value, str | list | tuple | Mapping):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        try:
            parameter.string_param = text
        except ValueError as error:
            raise InvalidArgument(f"option '{name}' must be valid Unicode: {error}") from error
    else:
        raise TypeError(f"option '{name}' is a number, a text, a bool, a list or a mapping, not {type(value).__name__}")


@dataclass(frozen=True)
class Response:
    """One message of the stream.

    Attributes:
        request_id: the turn it belongs to; empty when the server does not say.
        error: ends the turn.
        position: absolute position of the first id; None without ids.
        status: ends the turn well.
        is_final: nothing more comes for this turn.
    """

    request_id: str
    error: MicroturnError | None = None
    text: str = ""
    ids: tuple[int, ...] = ()
    position: int | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: TopLogprobs | None = None
    status: Status | None = None
    is_final: bool = False


def read_response(message: ModelStreamInferResponse) -> Response:
    """Reads a message; one that breaks the contract becomes a response with a :class:`ProtocolError`."""
    request_id: str = message.infer_response.id
    if message.error_message:
        return Response(request_id, from_wire(message.error_message), is_final=True)
    try:
        return _read_outputs(message.infer_response)
    except ProtocolError as error:
        return Response(request_id, error, is_final=True)
    except (ValueError, KeyError, IndexError, struct.error) as error:
        return Response(request_id, ProtocolError(f"a response cannot be read: {error}"), is_final=True)


def _read_outputs(response: ModelInferResponse) -> Response:
    raw: dict[str, bytes] = {
        output.name: data for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    is_final: bool = response.parameters["triton_final_response"].bool_param
    appended_ids = _read_ids(raw["appended_ids"]) if "appended_ids" in raw else None
    status = parse_status(_read_bytes(raw["status"]), appended_ids) if "status" in raw else None
    if is_final and status is None:
        raise ProtocolError("the last response of the turn has no status, so its outcome is not known")
    ids = _read_ids(raw["output_ids"]) if "output_ids" in raw else ()
    return Response(
        request_id=response.id,
        text=_read_bytes(raw["text_output"]).decode() if "text_output" in raw else "",
        ids=ids,
        position=_read_ids(raw["output_position"])[0] if ids else None,
        logprobs=struct.unpack(f"<{len(raw['logprobs']) // 4}f", raw["logprobs"]) if "logprobs" in raw else None,
        top_logprobs=_read_top(response, raw, len(ids)) if "top_ids" in raw else None,
        status=status,
        is_final=is_final or status is not None,
    )


def _read_top(response: ModelInferResponse, raw: Mapping[str, bytes], num_ids: int) -> TopLogprobs:
    """For each token pairs of an id and its log probability."""
    num_top = next(output.shape[2] for output in response.outputs if output.name == "top_ids")
    logprobs = struct.unpack(f"<{len(raw['top_logprobs']) // 4}f", raw["top_logprobs"])
    pairs = list(zip(_read_ids(raw["top_ids"]), logprobs, strict=True))
    if len(pairs) != num_ids * num_top:
        raise ValueError(f"{len(pairs)} likely tokens for {num_ids} with {num_top} each")
    return tuple(tuple(pairs[first : first + num_top]) for first in range(0, len(pairs), num_top))


def _read_ids(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def _read_bytes(data: bytes) -> bytes:
    length = int.from_bytes(data[:4], "little")
    if len(data) != 4 + length:
        raise ValueError(f"{len(data)} bytes hold a text of {length}")
    return data[4:]
