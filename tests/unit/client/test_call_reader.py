"""Tests of call_reader: calls in the notations of all families, however the text is cut into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microturn_client._call_reader import CallReader
from microturn_client._tool_events import ToolArguments, ToolCall, ToolCallBegun, ToolEvent

NAMES = ("get_weather", "add")
BERN = {"city": "Bern", "days": 2}
BERN_JSON = '{"city": "Bern", "days": 2}'


def read(answer: str, *, num_pieces: int = 1, seed: int = 0) -> tuple[str, list[ToolEvent]]:
    """What a reader makes of an answer that comes in pieces."""
    reader, said, events = CallReader(NAMES), "", []
    cuts = sorted(random.Random(seed).choices(range(len(answer) + 1), k=num_pieces - 1))
    for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True):
        more, calls = reader.feed(answer[begin:end])
        said, events = said + more, events + calls
    more, calls = reader.end()
    return said + more, events + calls


def calls_in(events: list[ToolEvent]) -> list[tuple[str, Any]]:
    return [(event.name, event.arguments) for event in events if isinstance(event, ToolCall)]


def check_order(events: list[ToolEvent]) -> None:
    """Each call begins once, its arguments come in pieces that make its JSON, and it ends before the next one."""
    open_call: ToolCallBegun | None = None
    pieces = ""
    for event in events:
        if isinstance(event, ToolCallBegun):
            assert open_call is None
            open_call, pieces = event, ""
        elif isinstance(event, ToolArguments):
            assert open_call is not None
            assert event.id == open_call.id
            assert event.json
            pieces += event.json
        else:
            assert open_call is not None
            assert (event.id, event.name) == (open_call.id, open_call.name)
            assert pieces == event.json or (not pieces and event.arguments is None)
            open_call = None
    assert open_call is None


ANSWERS = [
    # hermes, Qwen
    (f'<tool_call>\n{{"name": "get_weather", "arguments": {BERN_JSON}}}\n</tool_call>', "", [("get_weather", BERN)]),
    (
        'Let me see. <tool_call>{"name": "add", "arguments": {}}</tool_call>\n'
        f'<tool_call>{{"arguments": {BERN_JSON}, "name": "get_weather"}}</tool_call> Done.',
        "Let me see. Done.",
        [("add", {}), ("get_weather", BERN)],
    ),
    (f'<tool_call>{{"name": "add", "arguments": {json.dumps(BERN_JSON)}}}</tool_call>', "", [("add", BERN)]),
    ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', "", [("add", {})]),
    ('<tool_call>{"name": "add", "arguments": ""}</tool_call>', "", [("add", {})]),
    (
        '<tool_call>{"name": "unknown", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("unknown", {"a": "</tool_call>"})],
    ),
    # Llama 3
    (f'{{"name": "get_weather", "parameters": {BERN_JSON}}}', "", [("get_weather", BERN)]),
    (f'\n{{"type": "function", "name": "add", "parameters": {BERN_JSON}}}', "", [("add", BERN)]),
    (
        f'<|python_tag|>{{"name": "add", "parameters": {{}}}}; {{"name": "get_weather", "parameters": {BERN_JSON}}}',
        "",
        [("add", {}), ("get_weather", BERN)],
    ),
    # Mistral
    (
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {BERN_JSON}, "id": "abcdefghi"}}, '
        '{"name": "add", "arguments": {}}]',
        "",
        [("add", BERN), ("add", {})],
    ),
    (
        f"Yes.[TOOL_CALLS]get_weather[ARGS]{BERN_JSON}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{{}}",
        "Yes.",
        [("get_weather", BERN), ("add", {})],
    ),
    (f"[TOOL_CALLS]get_weather{BERN_JSON}", "", [("get_weather", BERN)]),
    # pythonic
    (
        "[get_weather(city='Bern', days=2), add()]",
        "",
        [("get_weather", BERN), ("add", {})],
    ),
    (
        '<|python_start|>[add(a=[1, 2.5], b={"c": true}, d=") \\" ]", e=-1, f=None)]<|python_end|>',
        "",
        [("add", {"a": [1, 2.5], "b": {"c": True}, "d": ') " ]', "e": -1, "f": None})],
    ),
    # harmony
    (
        "<|channel|>analysis<|message|>The user wants <the> weather.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{BERN_JSON}<|call|>",
        "",
        [("get_weather", BERN)],
    ),
    (
        f"<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{BERN_JSON}",
        "",
        [("add", BERN)],
    ),
    (
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.",
        "I look it up.Sunny.",
        [],
    ),
    # no calls
    ("It is 20 degrees, <b>sunny</b>.", "It is 20 degrees, <b>sunny</b>.", []),
    ('{"city": "Bern"}', '{"city": "Bern"}', []),
    ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
    ("[1, 2] is a list", "[1, 2] is a list", []),
    ("[footnote(1)]", "[footnote(1)]", []),
    ("Do not say <tool_call", "Do not say <tool_call", []),
    ("<tool_call>none</tool_call>", "<tool_call>none</tool_call>", []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("", "", []),
    ("  \n", "  \n", []),
]


@pytest.mark.parametrize("num_pieces", [1, 2, 7, 200])
@pytest.mark.parametrize(("answer", "said", "calls"), ANSWERS)
def test_what_is_said_and_what_is_called(answer: str, said: str, calls: list[tuple[str, Any]], num_pieces: int) -> None:
    text, events = read(answer, num_pieces=num_pieces)
    assert text == said
    assert calls_in(events) == calls
    check_order(events)


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1', [("add", None)]),
        ('<tool_call>{"name": "add", "arguments": {"a": 1]}}</tool_call>', [("add", None)]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [("add", None)]),
        ('{"name": "add", "parameters": {"a": "', [("add", None)]),
        ("[add(a=1, b=", [("add", None)]),
        ("[add(1)]", [("add", None)]),
        ("[add(a=open('x'))]", [("add", None)]),
        ("[TOOL_CALLS]add[ARGS]{", [("add", None)]),
        ("<|channel|>commentary to=functions.add<|message|>{", [("add", None)]),
    ],
)
def test_a_call_that_is_cut_short_or_malformed_has_no_arguments(answer: str, calls: list[tuple[str, Any]]) -> None:
    for num_pieces in (1, 30):
        _, events = read(answer, num_pieces=num_pieces)
        assert calls_in(events) == calls
        check_order(events)


def test_a_malformed_call_takes_nothing_of_what_is_behind_it() -> None:
    malformed = '<tool_call>{"name": "add", "arguments": }}</tool_call>'
    said, events = read(f'{malformed}Sorry. <tool_call>{{"name": "add"}}</tool_call>')
    assert said == "Sorry. "
    assert calls_in(events) == [("add", None), ("add", {})]


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(NAMES)
    reader.feed('<tool_call>{"name": "add", "arg')
    _, events = reader.feed('uments": {"a": "long')
    assert [event.json for event in events if isinstance(event, ToolArguments)] == ["{", '"a"', ":", " "]
    _, events = reader.feed(' text", "b": 1}}')
    assert "".join(event.json for event in events if isinstance(event, ToolArguments)) == '"long text", "b": 1}'


def test_arguments_that_are_json_within_json_are_told_as_json() -> None:
    _, events = read(f'<tool_call>{{"name": "add", "arguments": {json.dumps(BERN_JSON)}}}</tool_call>', num_pieces=20)
    assert [event.json for event in events if isinstance(event, ToolArguments)] == [BERN_JSON]
    assert [event.json for event in events if isinstance(event, ToolCall)] == [BERN_JSON]


def test_a_call_begins_once_though_it_says_its_name_twice() -> None:
    _, events = read('<tool_call>{"name": "add", "name": "get_weather", "arguments": {}}</tool_call>')
    assert calls_in(events) == [("add", {})]
    check_order(events)


def test_a_name_comes_before_its_arguments() -> None:
    reader = CallReader(NAMES)
    _, (begun,) = reader.feed('<tool_call>{"name": "add"')
    assert isinstance(begun, ToolCallBegun)
    assert begun.name == "add"


def test_an_id_of_the_model_is_kept_and_others_differ() -> None:
    _, events = read('[TOOL_CALLS][{"id": "abcdefghi", "name": "add"}, {"name": "add"}, {"name": "add"}]')
    ids = [event.id for event in events if isinstance(event, ToolCall)]
    assert ids[0] == "abcdefghi"
    assert len(set(ids)) == 3
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_speech_is_held_no_longer_than_it_may_be_the_beginning_of_a_call() -> None:
    reader = CallReader(NAMES)
    assert reader.feed("One < two <tool") == ("One < two ", [])
    assert reader.feed("box> three") == ("<toolbox> three", [])
    assert reader.feed(" four") == (" four", [])


CHARS = "<>{}[]()\"'\\,:;= ab1\n"
MARKS = "<tool_call> </tool_call> [TOOL_CALLS] [ARGS] <|channel|> <|start|> <|message|> <|python_tag|> <|python_start|>"
WORDS = '"name" "add" "arguments" add( analysis to=add'
PARTS = st.sampled_from([*CHARS, *MARKS.split(), *WORDS.split()])


@given(st.lists(PARTS, max_size=30).map("".join), st.integers(1, 20), st.integers(0, 100))
def test_any_text_is_read_the_same_in_any_pieces(answer: str, num_pieces: int, seed: int) -> None:
    whole, cut = read(answer), read(answer, num_pieces=num_pieces, seed=seed)
    assert cut[0] == whole[0]
    assert calls_in(cut[1]) == calls_in(whole[1])
    check_order(cut[1])
    if not any(mark in answer for mark in ("<tool_call>", "[TOOL_CALLS]", "<|", "add")):
        assert whole == (answer, [])
