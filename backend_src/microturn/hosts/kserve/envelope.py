"""KServe's messages without turns and tensors: which session a request is for, refusals, and the model's config.

It imports no torch, with which an edge would take several times the memory.
"""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import model_config_pb2, service_pb2

from microturn.errors import InvalidArgument, MicroturnError

MODEL_NAME = "streaming_llm"

_MAX_SESSION_ID_BYTES = 128


def session_of(message: Any) -> int | str:
    """The session that a request is for.

    Raises:
        InvalidArgument: it names none, or by an id that is not one.
    """
    said = message.parameters.get("sequence_id")
    match None if said is None else said.WhichOneof("parameter_choice"):
        case "int64_param" if said.int64_param > 0:
            return int(said.int64_param)
        case "string_param" if 0 < len(said.string_param.encode()) <= _MAX_SESSION_ID_BYTES:
            if "\0" not in said.string_param:
                return str(said.string_param)
    raise InvalidArgument(
        "the parameter sequence_id names the turn's session: an integer in [1, 2^63) or a text of 1 to 128 bytes "
        "without NUL"
    )


def new_response(request_id: str, *, is_last: bool) -> Any:
    """A `ModelStreamInferResponse` without outputs."""
    message = service_pb2.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.model_version, response.id = MODEL_NAME, "1", request_id
    response.parameters["triton_final_response"].bool_param = is_last
    return message


def refusal_of(request_id: str, error: MicroturnError) -> bytes:
    """A `ModelStreamInferResponse` that ends a turn with an error, serialized."""
    message = new_response(request_id, is_last=True)
    # A client's JSON may have half a pair of surrogates, which an error repeats and no message can carry.
    message.error_message = str(error).encode("utf-8", "replace").decode()
    return bytes(message.SerializeToString())


def config_response(parameters: dict[str, str]) -> bytes:
    """A `ModelConfigResponse` with these parameters, serialized."""
    config = model_config_pb2.ModelConfig(name=MODEL_NAME, model_transaction_policy={"decoupled": True})
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    return bytes(service_pb2.ModelConfigResponse(config=config).SerializeToString())
