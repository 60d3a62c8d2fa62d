"""Tests of tool_formats: which family a chat template is of, and grammars of calls that the client library reads."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import pytest
from jsonschema import validate

from microturn.errors import InvalidArgument
from microturn.text.chat_templates import tools_as_json
from microturn.text.grammar import Grammars
from microturn.text.grammar_source import GrammarSource
from microturn.text.grammar_vocabulary import TokenTexts
from microturn.text.tool_formats import ToolFormat
from microturn_client import ToolCall
from microturn_client._call_reader import CallReader
from support.grammars import encode, ids_of

MARKS = ["[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"]
SPECIAL_IDS = {mark: 128 + at for at, mark in enumerate(MARKS)}
END = SPECIAL_IDS["<|end|>"]
NUM_TOKENS = 128 + len(MARKS)

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["c", "f"]},
        "city": {"$ref": "#/$defs/city"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "is_long": {"type": "boolean"},
        "words": {"type": "array", "items": {"enum": ["wind", "it's", 'so "hot"']}, "maxItems": 2},
    },
    "required": ["city", "is_long"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Bern", "Zug am See"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "…", "parameters": WEATHER}},
    {"name": "stop"},
]
FAMILIES = ["hermes", "llama3_json", "mistral", "mistral_named", "pythonic", "harmony"]
OF_ONE_CALL = ("llama3_json", "harmony")


def tool_format(family: str) -> ToolFormat:
    special_ids = {mark: token_id for mark, token_id in SPECIAL_IDS.items() if mark != "[ARGS]"}
    return ToolFormat("mistral", SPECIAL_IDS) if family == "mistral_named" else ToolFormat(family, special_ids)


def source_of(choice: str, tools: Sequence[Mapping[str, Any]]) -> GrammarSource:
    return GrammarSource("tool_choice", choice, tools_as_json(tools))


@lru_cache
def grammars_of(family: str) -> Grammars:
    texts = [bytes([byte]) for byte in range(128)] + [b""] * len(MARKS)
    named = {token_id: mark for mark, token_id in SPECIAL_IDS.items()}
    return Grammars(lambda: TokenTexts(texts, named, encode), {END}, tool_format(family))


def answer_of(family: str, choice: str, seed: int) -> str:
    """A random answer, with special tokens as they are spelled."""
    matcher = grammars_of(family).compile(source_of(choice, TOOLS)).begin()
    rng, text = random.Random(seed), ""
    while not matcher.is_complete:
        token_id = rng.choice(ids_of(matcher.allowed(), NUM_TOKENS))
        matcher.accept(token_id)
        text += chr(token_id) if token_id < 128 else MARKS[token_id - 128]
    return text.removesuffix("<|end|>")


def calls_in(answer: str) -> list[ToolCall]:
    """What the client library makes of an answer; nothing else is said in it."""
    reader = CallReader(["get_weather", "stop"])
    said, events = reader.feed(answer)
    rest, more = reader.end()
    assert (said + rest).strip() == "", answer
    return [event for event in events + more if isinstance(event, ToolCall)]


def check(call: ToolCall) -> None:
    schema: Mapping[str, Any] = WEATHER if call.name == "get_weather" else {"type": "object", "maxProperties": 0}
    assert call.arguments is not None, call
    validate(dict(call.arguments), schema)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_required_is_one_or_more_calls_that_match_their_schemas(family: str) -> None:
    found = [calls_in(answer_of(family, "required", seed)) for seed in range(40)]
    for calls in found:
        assert calls
        for call in calls:
            check(call)
    assert {call.name for calls in found for call in calls} == {"get_weather", "stop"}
    assert any(len(calls) > 1 for calls in found) == (family not in OF_ONE_CALL)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_of_a_tool_is_one_call_of_it(family: str) -> None:
    for seed in range(20):
        (call,) = calls_in(answer_of(family, "get_weather", seed))
        assert call.name == "get_weather"
        check(call)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_arguments_may_come_and_those_that_are_not_required_may_not(family: str) -> None:
    names = [set(calls_in(answer_of(family, "get_weather", seed))[0].arguments or ()) for seed in range(60)]
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
