import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tritonclient.grpc import service_pb2

from microturn_client import InvalidArgument, MicroturnError, ProtocolError
from microturn_client._inputs import encode_input
from microturn_client._wire import (
    add_options,
    build_request,
    check_session_id,
    mark_end,
    mark_start,
    new_session_id,
    read_response,
    read_route,
    stream_metadata,
)


def build(options=None, session_id=5, tensor=None):
    return build_request("streaming_llm", "7", session_id, tensor or encode_input([1, 2]), options or {})


def test_a_request_has_one_raw_input_and_its_ids(wire):
    request = build({"max_tokens": 4})
    assert (request.model_name, request.id) == ("streaming_llm", "7")
    [tensor] = request.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("input_ids", "INT32", [1, 2])
    assert list(request.raw_input_contents) == [b"\x01\0\0\0\x02\0\0\0"]
    assert request.parameters["sequence_id"].int64_param == 5
    assert wire.option(request, "max_tokens") == 4
    assert set(request.parameters) == {"sequence_id", "max_tokens", "triton_enable_empty_final_response"}


def test_text_ids_travel_as_text():
    assert build(session_id="köln-1").parameters["sequence_id"].string_param == "köln-1"


def test_start_and_end_are_marks_of_triton():
    request = build()
    mark_start(request)
    mark_end(request)
    assert request.parameters["sequence_start"].bool_param
    assert request.parameters["sequence_end"].bool_param


@pytest.mark.parametrize(
    ("value", "field", "sent"),
    [
        (True, "bool_param", True),
        (np.bool_(False), "bool_param", False),
        (3, "int64_param", 3),
        (-(2**63), "int64_param", -(2**63)),
        (np.int64(3), "int64_param", 3),
        (0.5, "double_param", 0.5),
        (np.float32(0.5), "double_param", 0.5),
        ("user", "string_param", "user"),
        (["a", "ü"], "string_param", '["a", "ü"]'),
        ((1, 2), "string_param", "[1, 2]"),
        ([{"type": "function"}], "string_param", '[{"type": "function"}]'),
        ({"a": 1}, "string_param", '{"a": 1}'),
    ],
)
def test_an_option_travels_with_its_type(value, field, sent):
    parameter = build({"some_option": value}).parameters["some_option"]
    assert parameter.WhichOneof("parameter_choice") == field
    assert getattr(parameter, field) == sent


def test_an_option_that_is_none_is_left_out():
    assert "seed" not in build({"seed": None}).parameters


def test_options_that_are_there_stay():
    request = build({"temperature": 0.5})
    add_options(request, {"temperature": 1.0, "top_k": 3})
    assert request.parameters["temperature"].double_param == 0.5
    assert request.parameters["top_k"].int64_param == 3


@pytest.mark.parametrize("name", ["priority", "timeout", "headers", "sequence_id", "sequence_start", "triton_x"])
def test_what_triton_would_keep_for_itself_is_refused(name):
    with pytest.raises(InvalidArgument, match=name):
        build({name: 1})


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "\ud800", ["\ud800"]])
def test_a_value_that_does_not_fit_is_refused(value):
    with pytest.raises(InvalidArgument, match="seed"):
        build({"seed": value})


@pytest.mark.parametrize("value", [object(), b"abc", 1j, {1, 2}, [object()]])
def test_a_type_without_a_form_on_the_wire_is_refused(value):
    with pytest.raises(TypeError):
        build({"seed": value})


@given(st.integers(1, 2**63 - 1) | st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=128))
def test_good_session_ids_pass(session_id):
    assert check_session_id(session_id) == session_id


@pytest.mark.parametrize("session_id", [0, -1, 2**63, True, "", "x" * 129, "ö" * 65, "n\0a", "a\nb", "\ud800"])
def test_other_session_ids_are_refused(session_id):
    with pytest.raises(InvalidArgument):
        check_session_id(session_id)


def test_session_ids_are_random_and_good():
    ids = {new_session_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(check_session_id(session_id) for session_id in ids)


@pytest.mark.parametrize(("session_id", "header"), [(5, "5"), ("abc-1_x", "abc-1_x"), ("köln /1", "k%C3%B6ln%20%2F1")])
def test_the_affinity_header_is_plain_ascii(session_id, header):
    assert stream_metadata(session_id, None) == (("x-session-id", header),)
    assert stream_metadata(session_id, "a route")[1:] == (("x-session-route", "a route"),)


def test_a_route_is_what_the_proxy_says():
    assert read_route((("date", "today"), ("x-session-route", "there"))) == "there"
    assert read_route((("date", "today"),)) is None
    assert read_route(None) is None


def test_a_response_with_tokens(wire):
    response = read_response(wire.message("7", text="hé".encode(), ids=(5, 6), position=9, logprobs=(-0.5, -0.25)))
    assert (response.request_id, response.text, response.ids, response.position) == ("7", "hé", (5, 6), 9)
    assert response.logprobs == (-0.5, -0.25)
    assert response.status is None
    assert not response.is_final


def test_a_response_with_the_likeliest_tokens(wire):
    top = (((5, -0.5), (7, -1.5)), ((8, -0.125), (6, -0.25)))
    response = read_response(wire.message("7", ids=(5, 6), position=9, logprobs=(-0.5, -0.25), top=top))
    assert response.top_logprobs == top
    broken = wire.message("7", ids=(5, 6, 7), position=9, logprobs=(-0.5, -0.25, -0.5), top=top[:1])
    broken.infer_response.outputs[-2].shape[:] = [1, 3, 0]
    assert isinstance(read_response(broken).error, ProtocolError)
    short = read_response(wire.message("7", ids=(5, 6), position=9, logprobs=(-0.5, -0.25), top=top[:1]))
    assert isinstance(short.error, ProtocolError)


def test_a_last_response(wire):
    response = read_response(wire.message("7", end=wire.status(context_len=3), appended_ids=(1, 2)))
    assert response.is_final
    assert response.status.context_len == 3
    assert response.status.appended_ids == (1, 2)
    assert response.ids == ()
    assert response.position is None


def test_a_status_ends_a_turn_even_where_the_final_flag_comes_alone(wire):
    assert read_response(wire.message("7", end=wire.status(), is_final=False)).is_final


def test_an_error_ends_a_turn(wire):
    response = read_response(wire.error("7", "INVALID_ARGUMENT: unknown option"))
    assert response.is_final
    assert type(response.error) is InvalidArgument


def test_a_last_response_without_status_is_no_success(wire):
    response = read_response(wire.message("7", ids=(1,), is_final=True))
    assert response.is_final
    assert type(response.error) is ProtocolError
    assert "no status" in str(response.error)


@pytest.mark.parametrize(
    "outputs",
    [
        {"text": b"\xff"},
        {"end": b"{}"},
        {"end": b"\xff"},
        {"end": json.dumps([]).encode()},
    ],
)
def test_a_response_that_cannot_be_read_is_an_error_of_its_turn(wire, outputs):
    response = read_response(wire.message("7", **outputs))
    assert response.request_id == "7"
    assert type(response.error) is ProtocolError


def test_ids_without_a_position_break_the_contract(wire):
    message = wire.message("7", ids=(1,))
    del message.infer_response.outputs[1]
    del message.infer_response.raw_output_contents[1]
    assert type(read_response(message).error) is ProtocolError


@pytest.mark.parametrize("data", [b"", b"\x05\0\0\0abc", b"\x01\0\0\0abc"])
def test_a_text_of_another_length_breaks_the_contract(wire, data):
    message = wire.message("7", text=b"abc")
    message.infer_response.raw_output_contents[0] = data
    assert type(read_response(message).error) is ProtocolError


names = st.sampled_from(
    [
        "output_ids",
        "text_output",
        "output_position",
        "appended_ids",
        "logprobs",
        "top_ids",
        "top_logprobs",
        "status",
        "other",
    ]
)


@given(st.lists(st.tuples(names, st.binary(max_size=40))), st.lists(st.binary(max_size=8), max_size=1), st.booleans())
def test_no_response_breaks_the_reader(outputs, more_data, is_final):
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.id = "7"
    message.infer_response.parameters["triton_final_response"].bool_param = is_final
    for name, data in outputs:
        message.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
        message.infer_response.raw_output_contents.append(data)
    message.infer_response.raw_output_contents.extend(more_data)
    response = read_response(message)
    assert response.request_id == "7"
    assert response.error is None or isinstance(response.error, MicroturnError)
    assert not response.is_final or (response.error is None) != (response.status is None)
