"""Tests of tool_formats: which family a chat template is of, and grammars of calls that the client library reads."""

from __future__ import annotations

from typing import Any

import pytest

from microturn.errors import InvalidArgument
from microturn.text.tool_formats import ToolFormat
from microturn_client import ToolCall
from support.tool_notations import (
    FAMILIES,
    TOOLS,
    WEATHER,
    answer_of,
    calls_in,
    check,
    grammar_of,
    grammars_of,
    source_of,
    spelled,
    tool_format,
)

OF_ONE_CALL = ("llama3_json", "harmony")


def called(family: str, choice: str, seed: int) -> list[ToolCall]:
    """The calls of a random answer."""
    return calls_in(spelled(answer_of(grammar_of(family, source_of(choice, TOOLS)), seed)))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_required_is_one_or_more_calls_that_match_their_schemas(family: str) -> None:
    found = [called(family, "required", seed) for seed in range(40)]
    for calls in found:
        assert calls
        for call in calls:
            check(call)
    assert {call.name for calls in found for call in calls} == {"get_weather", "stop"}
    assert any(len(calls) > 1 for calls in found) == (family not in OF_ONE_CALL)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_of_a_tool_is_one_call_of_it(family: str) -> None:
    for seed in range(20):
        (call,) = called(family, "get_weather", seed)
        assert call.name == "get_weather"
        check(call)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_arguments_may_come_and_those_that_are_not_required_may_not(family: str) -> None:
    names = [set(called(family, "get_weather", seed)[0].arguments or ()) for seed in range(60)]
    assert set().union(*names) == set(WEATHER["properties"])
    assert set.intersection(*names) == set(WEATHER["required"])


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>\n{...}</tool_call>", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<|python_tag|> [func_name1(params_name1=params_value1)]", "pythonic"),
        ("<|python_start|>", "pythonic"),
        ("<|start|><|channel|>analysis<|message|>", "harmony"),
    ],
)
def test_the_family_is_told_by_the_chat_template(template: str, family: str) -> None:
    known = ToolFormat.of(template, {})
    assert known is not None
    assert known.family == family


@pytest.mark.parametrize("template", ["", "null", "<|im_start|>", "<tool_call>\n<function=f>"])
def test_other_templates_tell_none(template: str) -> None:
    assert ToolFormat.of(template, {}) is None


@pytest.mark.parametrize(
    ("choice", "tools", "reason"),
    [
        ("required", [], "give them to START"),
        ("get_wether", TOOLS, "did you mean 'get_weather'"),
        ("f", [{"type": "function"}], "a function with a name"),
        ("f", [{"name": "f", "parameters": 3}], "no JSON schema"),
        ("f", [{"name": "f", "parameters": {"description": "x" * 70_000}}], "a grammar of"),
    ],
)
def test_what_is_no_tool_is_refused_with_the_reason(choice: str, tools: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        tool_format("hermes").as_llguidance(source_of(choice, tools))


def test_a_schema_that_is_none_is_refused_under_the_name_of_the_option() -> None:
    source = source_of("f", [{"name": "f", "parameters": {"type": "objekt"}}])
    with pytest.raises(InvalidArgument, match="'tool_choice' is refused"):
        grammars_of("hermes").compile(source)
