"""Tests of options."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microturn.errors import InvalidArgument
from microturn.sessions.options import (
    MAX_PARAMETERS_LEN,
    OF_ONE_TURN,
    TENANT_HEADER,
    SessionOptions,
    TurnOptions,
    grammar_source,
    parse_parameters,
    parse_turn_options,
)
from microturn.text.grammar_source import GrammarSource

MAX_INT = 2**31 - 1
LONG_NUMBER = "9" * 5000
DEEP_NEST = "[" * 100_000


def turn_option(name: str, value: Any) -> Any:
    """What becomes of one option of a turn."""
    parsed, _ = parse_parameters(json.dumps({name: value}), start=False)
    return parsed[name]


def session_option(name: str, value: Any) -> Any:
    """What becomes of one option of START."""
    _, session_options = parse_parameters(json.dumps({name: value}), start=True)
    return getattr(session_options, name)


# ---- each option by itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("max_tokens", 0, MAX_INT),
        ("min_tokens", 0, MAX_INT),
        ("top_k", 0, MAX_INT),
        ("seed", 0, 2**63 - 1),
        ("turn", 0, 2**53),
        ("rewind_to", 0, 2**53),
    ],
)
def test_integers_have_a_range(name: str, low: int, high: int) -> None:
    for good in (low, high, str(low), str(high)):
        assert turn_option(name, good) == int(good)
        assert type(turn_option(name, good)) is int
    for bad in (low - 1, high + 1, str(high + 1), str(low - 1)):
        with pytest.raises(InvalidArgument, match=f"option '{name}' is an integer from {low} to {high}"):
            turn_option(name, bad)


@pytest.mark.parametrize("bad", [True, False, 1.0, 1.5, "1.0", "1e3", "", "many", None, [], {}, "nan", LONG_NUMBER])
@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "seed", "turn", "rewind_to"])
def test_what_is_no_integer_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"option '{name}' is an integer from"):
        turn_option(name, bad)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.7, 100], [-0.001, 100.1]),
        ("top_p", [0.001, 0.5, 1], [0, -0.5, 1.001]),
        ("min_p", [0, 0.05, 1], [-0.001, 1.001]),
        ("repetition_penalty", [0.001, 1, 100], [0, -1, 100.1]),
        ("presence_penalty", [-100, 0, 100], [-100.1, 100.1]),
        ("frequency_penalty", [-100, 0, 100], [-100.1, 100.1]),
        ("deadline_ms", [0, 0.5, 200, 3_600_000], [-1, 3_600_001]),
        ("stream_interval_ms", [0, 0.5, 50, 1000], [-1, 1000.1]),
    ],
)
def test_numbers_have_a_range(name: str, good: list[float], bad: list[float]) -> None:
    for number in good:
        for spelling in (number, str(number)):
            assert turn_option(name, spelling) == number
            assert type(turn_option(name, spelling)) is float
    for number in bad:
        for spelling in (number, str(number)):
            with pytest.raises(InvalidArgument, match=f"option '{name}' is a number"):
                turn_option(name, spelling)


@pytest.mark.parametrize(
    "bad", [math.nan, math.inf, -math.inf, "nan", "inf", "-Infinity", "1e999", True, False, "", "hot", None, [0.5]]
)
@pytest.mark.parametrize(
    "name",
    ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "deadline_ms"],
)
def test_what_is_no_finite_number_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"option '{name}' is a number"):
        turn_option(name, bad)


def test_an_integer_too_large_for_a_float_is_refused() -> None:
    """It raised OverflowError, which became INTERNAL on the wire."""
    with pytest.raises(InvalidArgument, match="option 'temperature' is a number from 0 to 100"):
        turn_option("temperature", 10**400)


BOOLEANS = ["ignore_eos", "skip_special_tokens", "return_appended_ids", "parse_special", "count_only", "stream"]


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans_are_true_or_false(name: str) -> None:
    for good in (True, "true"):
        assert turn_option(name, good) is True
    for good in (False, "false"):
        assert turn_option(name, good) is False
    for bad in (1, 0, "1", "True", "yes", "", None, []):
        with pytest.raises(InvalidArgument, match=f"option '{name}' is true or false"):
            turn_option(name, bad)


def test_a_tool_choice_goes_with_a_format_which_counts_where_no_call_is_forced() -> None:
    """``tool_choice`` beside a format was refused: both would say what the answer is."""
    for choice, source in [
        ("auto", GrammarSource("regex", "a")),
        ("none", GrammarSource("regex", "a")),
        ("required", GrammarSource("tool_choice", "required")),
        ("get_weather", GrammarSource("tool_choice", "get_weather")),
    ]:
        options, _ = parse_parameters(json.dumps({"tool_choice": choice, "regex": "a"}), start=False)
        assert grammar_source(options) == source
    for choice in ("auto", "none"):
        options, _ = parse_parameters(json.dumps({"tool_choice": choice, "grammar_from": 7}), start=False)
        assert grammar_source(options) is None


def test_logprobs_are_true_or_false_or_how_many_likely_tokens_come_too() -> None:
    for value, parsed, num_top in [
        (True, True, 0),
        ("true", True, 0),
        (False, False, 0),
        ("false", False, 0),
        (1, 1, 1),
        ("5", 5, 5),
        (20, 20, 20),
    ]:
        assert turn_option("logprobs", value) is parsed
        assert TurnOptions(logprobs=parsed).num_top_logprobs == num_top
    for bad in (0, 21, -1, "0", 1.0, "1.5", "yes", "", None, [], "１"):
        with pytest.raises(InvalidArgument, match="option 'logprobs' is true, false or an integer from 1 to 20"):
            turn_option("logprobs", bad)


def test_stop_strings_come_as_a_json_list() -> None:
    assert turn_option("stop", '["\\n\\n", "User:"]') == ("\n\n", "User:")
    assert turn_option("stop", ["a"]) == ("a",)
    assert turn_option("stop", "[]") == ()
    assert turn_option("stop", json.dumps(["x" * 256] * 16)) == ("x" * 256,) * 16


TOO_LONG, TOO_MANY = json.dumps(["x" * 257]), json.dumps(["x"] * 17)


@pytest.mark.parametrize(
    "bad", ["User:", '"User:"', "{}", "[1]", '[""]', '["a", null]', TOO_LONG, TOO_MANY, 5, DEEP_NEST]
)
def test_bad_stop_strings_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="option 'stop' is a JSON list of at most 16 strings"):
        turn_option("stop", bad)


def test_stop_token_ids_come_as_a_json_list() -> None:
    assert turn_option("stop_token_ids", "[0, 7]") == (0, 7)
    assert turn_option("stop_token_ids", json.dumps(list(range(256)))) == tuple(range(256))


@pytest.mark.parametrize(
    "bad", ["7", "[-1]", "[true]", "[1.0]", '["1"]', json.dumps([1] * 257), f"[{LONG_NUMBER}]", DEEP_NEST, 7]
)
def test_bad_stop_token_ids_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="option 'stop_token_ids' is a JSON list of at most 256 token ids"):
        turn_option("stop_token_ids", bad)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_roles_are_those_of_chat_templates(role: str) -> None:
    assert turn_option("role", role) == role


@pytest.mark.parametrize("bad", ["User", "", "developer", 1, None, ["user"]])
def test_other_roles_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="option 'role' is one of system, user, assistant, tool"):
        turn_option("role", bad)


def test_turns_that_overlap_wait_or_interrupt() -> None:
    assert turn_option("on_overlap", "queue") == "queue"
    assert turn_option("on_overlap", "interrupt") == "interrupt"
    for bad in ("Interrupt", "cancel", "", 1, True, None, ["queue"]):
        with pytest.raises(InvalidArgument, match="option 'on_overlap' is one of queue, interrupt"):
            turn_option("on_overlap", bad)


@pytest.mark.parametrize("name", ["session_key", TENANT_HEADER])
def test_keys_are_strings_of_some_length(name: str) -> None:
    for good in ("k", "k" * 256, "ключ", " "):
        parsed, _ = parse_parameters(json.dumps({name: good}), start=False)
        assert list(parsed.values()) == [good]
    for bad in ("", "k" * 257, 1, True, None, ["k"]):
        with pytest.raises(InvalidArgument, match=f"option '{name}' is a string of 1 to 256 characters"):
            parse_parameters(json.dumps({name: bad}), start=False)


def test_only_the_header_names_a_tenant() -> None:
    """A client that could say `tenant` would choose whose bound it fills."""
    assert parse_parameters(json.dumps({TENANT_HEADER: "a"}), start=True)[0] == {"tenant": "a"}
    with pytest.raises(InvalidArgument, match="unknown option 'tenant'"):
        parse_parameters('{"tenant": "a"}', start=True)


def test_a_client_that_names_a_tenant_beside_the_proxy_is_refused() -> None:
    """Triton puts the proxy's header and the client's parameter into one object: the later one would have won."""
    with pytest.raises(InvalidArgument, match="option 'x-microturn-tenant' came twice: send it once"):
        parse_parameters(f'{{"{TENANT_HEADER}": "a", "max_tokens": 1, "{TENANT_HEADER}": "b"}}', start=False)


def test_a_trace_parent_has_the_form_of_w3c() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert turn_option("traceparent", trace) == trace
    for bad in (trace + "-00", trace[:-1], trace.upper(), "", 7, trace + "\n"):
        with pytest.raises(InvalidArgument, match="option 'traceparent' is a W3C trace context"):
            turn_option("traceparent", bad)


def test_the_idle_time_of_a_session_stays_below_tritons() -> None:
    assert session_option("idle_timeout_s", "0.5") == 0.5
    assert session_option("idle_timeout_s", 3600) == 3600
    for bad in (0, -1, 3600.5, "nan", True):
        with pytest.raises(InvalidArgument, match="option 'idle_timeout_s' is a number above 0 and at most 3600"):
            session_option("idle_timeout_s", bad)


def test_a_context_holds_at_least_one_token() -> None:
    assert session_option("max_context", "128") == 128
    for bad in (0, -1, 2**31, 1.5):
        with pytest.raises(InvalidArgument, match="option 'max_context' is an integer from 1"):
            session_option("max_context", bad)


def test_priorities_are_integers_on_both_sides_of_zero() -> None:
    for good in (-100, 0, 100, "-100"):
        assert session_option("session_priority", good) == int(good)
    for bad in (-101, 101, 1.0, "high", True):
        with pytest.raises(InvalidArgument, match="option 'session_priority' is an integer from -100 to 100"):
            session_option("session_priority", bad)


def test_resume_is_true_or_false() -> None:
    assert session_option("resume", "true") is True
    assert session_option("resume", False) is False
    with pytest.raises(InvalidArgument, match="option 'resume' is true or false"):
        session_option("resume", 1)


def test_tools_are_a_json_list_of_objects() -> None:
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    assert json.loads(session_option("tools", json.dumps(tools))) == tools
    assert session_option("tools", "[]") == SessionOptions().tools
    for bad in ("clock", "[1]", '["clock"]', json.dumps([{"a": 1}] * 129), DEEP_NEST):
        with pytest.raises(InvalidArgument, match="option 'tools' is a JSON list of at most 128 objects"):
            session_option("tools", bad)


# ---- all of them together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", ["", "{}"])
def test_without_parameters_nothing_is_given(parameters: str) -> None:
    assert parse_parameters(parameters, start=True) == ({}, SessionOptions())
    assert parse_parameters(parameters, start=False) == ({}, SessionOptions())


def test_options_of_the_turn_and_of_the_session_come_apart() -> None:
    parameters = '{"max_tokens": "4", "idle_timeout_s": 5, "seed": 1, "max_context": 9}'
    turn, session = parse_parameters(parameters, start=True)
    assert turn == {"max_tokens": 4, "seed": 1}
    assert session == SessionOptions(idle_timeout_s=5.0, max_context=9)


@pytest.mark.parametrize("name", ["idle_timeout_s", "max_context", "tools", "session_priority", "resume"])
def test_session_options_come_with_start_only(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"option '{name}' comes with START only"):
        parse_parameters(json.dumps({name: "1"}), start=False)


def test_an_option_given_twice_is_refused_even_with_the_same_value() -> None:
    with pytest.raises(InvalidArgument, match="option 'top_k' came twice"):
        parse_parameters('{"top_k": 1, "top_p": 1, "top_k": 1}', start=False)


def test_too_many_options_are_not_even_read() -> None:
    """Sixteen stop strings of the greatest length are 4 KB: a megabyte of options is an attack."""
    longest = '{"stop": "[]"' + " " * (MAX_PARAMETERS_LEN - len('{"stop": "[]"}')) + "}"
    assert parse_parameters(longest, start=False)[0] == {"stop": ()}
    with pytest.raises(InvalidArgument, match="the options have 1048577 characters: at most 1048576 are read"):
        parse_parameters(longest + " ", start=False)
    with pytest.raises(InvalidArgument, match="the options have"):
        parse_parameters("[" * 2_000_000, start=False)


def test_a_name_of_any_length_is_told_back_in_short() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown option 'x{100}':"):
        parse_parameters(json.dumps({"x" * 100_000: 1}), start=False)


def test_what_holds_for_one_turn_is_an_option_of_turns() -> None:
    assert set(TurnOptions.__dataclass_fields__) >= OF_ONE_TURN


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("Seed", "seed"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_known_one(unknown: str, nearest: str) -> None:
    with pytest.raises(InvalidArgument, match=f"unknown option '{unknown}': did you mean '{nearest}'"):
        parse_parameters(json.dumps({unknown: 1}), start=False)


def test_an_option_like_no_other_is_refused_with_all_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown option 'zzz': known are: cache_salt, .*traceparent"):
        parse_parameters('{"zzz": 1}', start=False)


def test_one_bad_option_refuses_them_all() -> None:
    with pytest.raises(InvalidArgument, match="'top_p'"):
        parse_parameters('{"max_tokens": 4, "top_p": 2, "seed": 1}', start=False)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.integers().map(str)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
names = st.sampled_from([TENANT_HEADER, *TurnOptions.__dataclass_fields__, *SessionOptions.__dataclass_fields__])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.one_of(names, st.text(max_size=5)), json_values, max_size=3), st.booleans())
def test_whatever_comes_is_parsed_or_is_an_invalid_argument(parameters: dict[str, Any], start: bool) -> None:
    try:
        turn, _ = parse_parameters(json.dumps(parameters), start=start)
    except InvalidArgument:
        return
    assert set(turn) <= {"tenant" if name == TENANT_HEADER else name for name in parameters}
    TurnOptions(**turn)


@pytest.mark.parametrize(
    ("options", "has_penalties"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_p": 0.9}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_only_penalties_look_at_the_history(options: dict[str, float], has_penalties: bool) -> None:
    assert TurnOptions(**options).has_penalties is has_penalties


@pytest.mark.parametrize("number", ["1_0", "\u0663", "1_0.5"])
def test_a_decimal_string_has_ascii_digits_and_nothing_between_them(number: str) -> None:
    for name in ("max_tokens", "temperature"):
        with pytest.raises(InvalidArgument, match=f"option '{name}'"):
            turn_option(name, number)


def test_turn_options_come_back_from_where_they_were_written() -> None:
    options = parse_turn_options({"temperature": 0.5, "stop": ["a", "b"], "max_tokens": 3})
    assert (options.temperature, options.stop, options.max_tokens, options.top_p) == (0.5, ("a", "b"), 3, 1.0)
    assert parse_turn_options({}) == TurnOptions()


@pytest.mark.parametrize("values", [{"temperature": -1}, {"stop": "a"}, {"unheard_of": 1}, {"max_tokens": True}])
def test_what_no_turn_could_have_brought_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_turn_options(values)
