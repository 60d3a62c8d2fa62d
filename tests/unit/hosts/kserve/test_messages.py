"""Requests and responses of the wire contract, as KServe's messages."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from microturn.errors import InvalidArgument
from microturn.hosts.kserve.envelope import session_of
from microturn.hosts.kserve.messages import read_request, response_to
from microturn.sessions.inputs import TextInput, TokenInput
from microturn.sessions.turn import Status, TurnOutput, TurnRequest
from microturn.settings import TENANT_HEADER
from support.driver import Recorder
from support.raw import ids, set_parameter, turn_request


def read(message: Any, tenant: str | None = None) -> TurnRequest:
    return read_request(message, Recorder(), tenant, 0.0)


def refusal_of(message: Any, tenant: str | None = None) -> str:
    refusal = read(message, tenant).refusal
    assert refusal is not None
    assert refusal.code == "INVALID_ARGUMENT", refusal
    return str(refusal)


def with_tensor(shape: list[int], content: bytes = b"", name: str = "input_ids", datatype: str = "INT32") -> Any:
    message = turn_request("session")
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    message.raw_input_contents.append(content)
    return message


@pytest.mark.parametrize("session_id", [1, 2**63 - 1, "a", "é" * 64])
def test_a_session_is_named_by_a_number_or_a_text(session_id: int | str) -> None:
    assert session_of(turn_request(session_id)) == session_id


@pytest.mark.parametrize("session_id", [0, -5, "", "é" * 65, "n\0a", 1.0, True])
def test_what_names_no_session_is_refused(session_id: Any) -> None:
    message = turn_request("session")
    set_parameter(message, "sequence_id", session_id)
    with pytest.raises(InvalidArgument, match="sequence_id"):
        session_of(message)
    with pytest.raises(InvalidArgument, match="sequence_id"):
        session_of(service_pb2.ModelInferRequest())


def test_a_request_is_read_as_a_turn() -> None:
    request = read(turn_request("session", start=True, options={"max_tokens": 3, "seed": 4}, input_ids=ids(5, 6)))
    assert (request.session_id, request.start, request.end) == ("session", True, False)
    assert request.input == TokenInput((5, 6))
    assert request.refusal is None
    assert request.options["max_tokens"] == 3
    text = read(turn_request("session", end=True, text_input="é".encode()))
    assert (text.input, text.start, text.end) == (TextInput("é"), False, True)


def test_a_flag_of_another_type_is_refused() -> None:
    """It meant false: a START without START."""
    message = turn_request("session", input_ids=ids(5))
    set_parameter(message, "sequence_start", 1)
    with pytest.raises(InvalidArgument, match="sequence_start"):
        read(message)


@pytest.mark.parametrize("name", ["priority", "timeout", "headers", "sequence_x", "triton_x"])
def test_what_triton_keeps_for_itself_is_no_option(name: str) -> None:
    assert read(turn_request("session", input_ids=ids(5), options={name: 3})).refusal is None


@pytest.mark.parametrize("name", ["priority_x", "timeouts", "headers_x"])
def test_an_option_that_begins_like_those_is_unknown(name: str) -> None:
    """These were left out in silence."""
    assert name in refusal_of(turn_request("session", input_ids=ids(5), options={name: 3}))


def test_a_client_names_no_tenant() -> None:
    message = turn_request("session", input_ids=ids(5), options={TENANT_HEADER: "umbrella"})
    assert "came twice" in refusal_of(message, "acme")
    assert "max_sessions_per_tenant" in refusal_of(message)
    message.parameters.pop(TENANT_HEADER)
    assert read(message, "acme").options["tenant"] == "acme"


@pytest.mark.parametrize(
    "message",
    [
        with_tensor([1, 2], b"abcd"),
        with_tensor([1, 1], b"abc"),
        with_tensor([-1, -1], b"abcd"),
        with_tensor([1, 1], b"abcd", datatype="INT64"),
        with_tensor([1, 1], b"abcd", name="tokens"),
        with_tensor([1, 1], b"\x05\0\0\0abcd", name="text_input", datatype="BYTES"),
        with_tensor([1, 1], b"\x05", name="text_input", datatype="BYTES"),
        with_tensor([1] * 100, b"abcd"),
        with_tensor([0, 2**62]),
        with_tensor([1, 0, 2**62, 4]),
    ],
    ids=["size", "odd", "negative", "type", "name", "short text", "no length", "dims", "too large", "too large too"],
)
def test_a_tensor_that_is_none_is_an_invalid_argument(message: Any) -> None:
    """Of the last three numpy said so, in an error of its own, which became INTERNAL."""
    refusal_of(message)


def test_a_shape_of_many_lengths_costs_nothing() -> None:
    """The product of its lengths was computed first: 60,000 of them stopped all streams of a worker for 6 s."""
    begun_s = time.monotonic()
    refusal_of(with_tensor([2**62] * 60_000))
    assert time.monotonic() - begun_s < 1.0


def test_an_input_that_comes_twice_is_refused() -> None:
    """The first of them was lost."""
    message = turn_request("session", input_ids=ids(5))
    message.inputs.add(name="input_ids", datatype="INT32", shape=[1, 1])
    message.raw_input_contents.append(b"abcd")
    assert "came twice" in refusal_of(message)


def test_inputs_without_contents_are_refused() -> None:
    message = turn_request("session", input_ids=ids(5))
    message.raw_input_contents.pop()
    refusal_of(message)


def test_a_response_has_the_tensors_of_its_answer() -> None:
    output = TurnOutput(token_ids=(5, 6), position=7, text="é")
    response = service_pb2.ModelStreamInferResponse.FromString(response_to("id", output)).infer_response
    contents = {one.name: raw for one, raw in zip(response.outputs, response.raw_output_contents, strict=True)}
    assert response.id == "id"
    assert not response.parameters["triton_final_response"].bool_param
    assert np.frombuffer(contents["output_ids"], np.int32).tolist() == [5, 6]
    assert np.frombuffer(contents["output_position"], np.int32).tolist() == [7]
    assert contents["text_output"] == b"\x02\0\0\0" + "é".encode()


def test_the_last_response_says_so() -> None:
    status = Status("length", None, 0, 3, 3, {}, {}, 60.0, 1)
    message = service_pb2.ModelStreamInferResponse.FromString(response_to("id", TurnOutput(status=status)))
    (content,) = message.infer_response.raw_output_contents
    assert json.loads(content[4:])["finish_reason"] == status.finish_reason
    assert message.infer_response.parameters["triton_final_response"].bool_param


def test_an_error_is_a_last_response_whatever_its_words_are() -> None:
    """Half a surrogate pair, as JSON may have it, raised while the error was serialized: on a worker this ended the
    stream of the turn in a way that an edge took for the end of the worker."""
    error = InvalidArgument("no tool '\ud800'")
    message = service_pb2.ModelStreamInferResponse.FromString(response_to("id", error))
    assert message.error_message == "INVALID_ARGUMENT: no tool '?'"
    assert message.infer_response.id == "id"
    assert message.infer_response.parameters["triton_final_response"].bool_param
