import copy
import inspect
import re
from pathlib import Path

import grpc
import hypothesis.strategies as st
import pytest
from hypothesis import given

import microturn_client
from microturn_client import _errors
from microturn_client._errors import MicroturnError, from_grpc, from_wire

PROTOCOL = Path(__file__).parents[3] / "client" / "PROTOCOL.md"

CODES = {
    "INVALID_ARGUMENT": microturn_client.InvalidArgument,
    "NOT_FOUND": microturn_client.NotFound,
    "EXPIRED": microturn_client.Expired,
    "CONTEXT_FULL": microturn_client.ContextFull,
    "RESOURCE_EXHAUSTED": microturn_client.ResourceExhausted,
    "FAILED_PRECONDITION": microturn_client.FailedPrecondition,
    "PERMISSION_DENIED": microturn_client.PermissionDenied,
    "DEADLINE_EXCEEDED": microturn_client.DeadlineExceeded,
    "UNAVAILABLE": microturn_client.Unavailable,
    "INTERNAL": microturn_client.InternalError,
}


def all_classes(of: type[MicroturnError] = MicroturnError) -> list[type[MicroturnError]]:
    return [found for kind in of.__subclasses__() for found in (kind, *all_classes(kind))]


@pytest.mark.parametrize(("code", "kind"), CODES.items())
def test_every_code_of_the_contract_has_its_class(code, kind):
    error = from_wire(f"{code}: do something else")
    assert type(error) is kind
    assert error.code == code
    assert str(error) == error.message == "do something else"


def test_the_protocol_page_lists_exactly_these_codes():
    section = PROTOCOL.read_text().split("## Errors")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([A-Z_]+)` \|", section, re.MULTILINE)) == CODES.keys()


def test_every_class_is_exported_and_drawn_and_has_a_code_of_the_contract():
    drawing = _errors.__doc__
    for kind in all_classes():
        assert getattr(microturn_client, kind.__name__) is kind
        assert re.search(rf"── {kind.__name__}\b", drawing), kind
        assert kind.code in CODES


def test_details_are_numbers_beside_the_message():
    error = from_wire("RESOURCE_EXHAUSTED: try again [retry_after_ms=250 turn=3 position=-1]")
    assert error.message == "try again"
    assert error.details == {"retry_after_ms": 250, "turn": 3, "position": -1}
    assert error.retry_after_ms == 250
    assert error.route is None


def test_a_route_is_a_text_beside_them():
    error = from_wire("UNAVAILABLE: go on there [route=MTI3LjAuMC4xOjgwMDE= retry_after_ms=5]")
    assert (error.message, error.route, error.details) == ("go on there", "MTI3LjAuMC4xOjgwMDE=", {"retry_after_ms": 5})
    assert from_wire("UNAVAILABLE: a sentence [of=words]").message == "a sentence [of=words]"
    assert from_wire("NOT_FOUND: no [such] thing").details == {}
    assert from_wire("NOT_FOUND: no [such] thing").message == "no [such] thing"
    assert from_wire("NOT_FOUND: none").retry_after_ms is None


@pytest.mark.parametrize("text", ["TEAPOT: short and stout", "something without a code", "", "INTERNAL"])
def test_what_nobody_knows_is_the_servers_fault_and_stays_readable(text):
    error = from_wire(text)
    assert type(error) is microturn_client.InternalError
    assert str(error) == text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "inference request for sequence 77 to model 'streaming_llm' must specify the START flag on the first "
            "request of the sequence",
            microturn_client.NotFound,
        ),
        ("Request for unknown model: 'nope' is not found", microturn_client.NotFound),
        ("Request for unknown model: 'streaming_llm' has no available versions", microturn_client.Unavailable),
        ("Stub process 'streaming_llm_0_0' is not healthy.", microturn_client.Unavailable),
        (
            "Server is stopping, scheduler for model has stopped accepting new inference requests",
            microturn_client.Unavailable,
        ),
        (
            "[request id: a] inference input 'input_ids' data-type is 'INT64', but model 'streaming_llm' expects "
            "'INT32'",
            microturn_client.InvalidArgument,
        ),
        ("unexpected inference input 'foo' for model 'streaming_llm'", microturn_client.InvalidArgument),
        (
            "[request id: a] input byte size mismatch for input 'input_ids' for model 'streaming_llm'. Expected 20, "
            "got 8",
            microturn_client.InvalidArgument,
        ),
        ("string correlation ID cannot be longer than 128 characters", microturn_client.InvalidArgument),
        (
            "incomplete string data for inference input 'text_input', expecting string of length 2147483647 but only 3 "
            "bytes available",
            microturn_client.InvalidArgument,
        ),
    ],
)
def test_tritons_own_words_as_triton_2_51_says_them(text, kind):
    error = from_wire(text)
    assert type(error) is kind
    assert error.message == text


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_grpc_status_is_mapped(status):
    assert status.name in _errors._GRPC_STATUS
    error = from_grpc(status, "the reason")
    assert isinstance(error, MicroturnError)
    assert "the reason" in str(error)
    assert status.name in str(error)


@pytest.mark.parametrize("name", ["OK", "CANCELLED", "UNKNOWN", "ABORTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"])
def test_a_stream_that_breaks_is_a_lost_connection(name):
    assert type(from_grpc(grpc.StatusCode[name], None)) is microturn_client.ConnectionLost


@given(st.text())
def test_no_message_of_a_server_breaks_the_mapping(text):
    assert isinstance(from_wire(text), MicroturnError)


NAMES = st.from_regex(r"[a-z]\w{0,9}", fullmatch=True, alphabet=st.characters(codec="ascii"))


@given(
    st.sampled_from(sorted(CODES)),
    st.text(st.characters(exclude_characters="[]"), min_size=1),
    st.dictionaries(NAMES, st.integers()),
)
def test_code_sentence_and_details_come_back_as_they_were_written(code, sentence, details):
    extras = " ".join(f"{name}={value}" for name, value in details.items())
    error = from_wire(f"{code}: {sentence}" + (f" [{extras}]" if extras else ""))
    assert (error.code, error.message, error.details) == (code, sentence, details)


def test_an_error_can_be_copied_for_each_turn_that_it_ends():
    error = from_wire("EXPIRED: open another [turn=3]")
    twin = copy.copy(error)
    assert twin is not error
    assert (type(twin), twin.message, twin.details) == (type(error), error.message, error.details)


def test_every_class_says_what_to_make_of_it():
    for kind in all_classes():
        assert inspect.getdoc(kind) != inspect.getdoc(MicroturnError), kind
