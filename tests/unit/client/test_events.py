import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from microturn_client import ProtocolError, Status, Timing, Usage
from microturn_client._events import parse_status


def test_all_fields_are_typed(wire):
    raw = wire.status(finish_reason="stop", stop_reason="\n\n", turn=3, replayed=True)
    status = parse_status(json.dumps(raw).encode(), (5, 6))
    assert status == Status(
        finish_reason="stop",
        stop_reason="\n\n",
        turn=3,
        context_len=7,
        kept_len=7,
        usage=Usage(input_tokens=3, output_tokens=4, computed_tokens=6, cached_tokens=0),
        timing_ms=Timing(queue=0.1, restore=0.0, prefill=4.5, decode=20.0, total=24.6),
        expires_in_s=60.0,
        seed=1234,
        appended_ids=(5, 6),
        replayed=True,
    )


@pytest.mark.parametrize("stop_reason", [None, 2, "stop"])
def test_the_stop_reason_is_an_id_a_text_or_nothing(wire, stop_reason):
    assert parse_status(json.dumps(wire.status(stop_reason=stop_reason)).encode(), None).stop_reason == stop_reason


def test_names_of_a_later_protocol_are_left_aside(wire):
    raw = wire.status(tier="host")
    raw["usage"]["dropped_tokens"] = 3
    raw["timing_ms"]["detokenize"] = 1.0
    assert parse_status(json.dumps(raw).encode(), None).usage.input_tokens == 3


@pytest.mark.parametrize(
    "name",
    ["finish_reason", "stop_reason", "turn", "context_len", "kept_len", "usage", "timing_ms", "expires_in_s", "seed"],
)
def test_a_missing_field_breaks_the_contract(wire, name):
    raw = wire.status()
    del raw[name]
    with pytest.raises(ProtocolError, match=name):
        parse_status(json.dumps(raw).encode(), None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"turn": "1"},
        {"turn": True},
        {"turn": 1.5},
        {"finish_reason": 3},
        {"stop_reason": 1.5},
        {"usage": []},
        {"usage": {}},
        {"timing_ms": {"queue": "1"}},
        {"expires_in_s": "soon"},
        {"expires_in_s": None},
    ],
)
def test_a_field_of_another_type_breaks_the_contract(wire, wrong):
    with pytest.raises(ProtocolError):
        parse_status(json.dumps(wire.status(**wrong)).encode(), None)


@given(
    st.one_of(
        st.binary(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(json.dumps)
    )
)
def test_anything_else_breaks_the_contract(text):
    with pytest.raises(ProtocolError):
        parse_status(text if isinstance(text, bytes) else text.encode(), None)
