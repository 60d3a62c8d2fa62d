"""Tool calls in the notations of all families, over a vocabulary of ASCII and the marks that are tokens."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema import validate

from microturn.text.answer_grammar import AnswerGrammar
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


def grammar_of(family: str, *sources: GrammarSource) -> AnswerGrammar:
    """What an answer matches that may choose among these, from a model of that family."""
    return AnswerGrammar(tuple(map(grammars_of(family).compile, sources)))


def answer_of(grammar: AnswerGrammar, seed: int) -> list[int]:
    """A random answer, without the token that ends it."""
    matcher, rng, answer = grammar.begin(), random.Random(seed), list[int]()
    while not matcher.is_complete:
        answer.append(rng.choice(ids_of(matcher.allowed(), NUM_TOKENS)))
        matcher.accept(answer[-1])
    return answer[:-1] if answer[-1] == END else answer


def spelled(answer: Sequence[int]) -> str:
    """The text of an answer, with special tokens as they are spelled."""
    return "".join(chr(token_id) if token_id < 128 else MARKS[token_id - 128] for token_id in answer)


def calls_in(answer: str) -> list[ToolCall]:
    """What the client library makes of an answer; nothing else is said in it."""
    reader = CallReader(["get_weather", "stop"])
    said, events = reader.feed(answer)
    rest, more = reader.end()
    assert (said + rest).strip() == "", answer
    return [event for event in events + more if isinstance(event, ToolCall)]


def check(call: ToolCall) -> None:
    """Whether its arguments match their schema."""
    schema: Mapping[str, Any] = WEATHER if call.name == "get_weather" else {"type": "object", "maxProperties": 0}
    assert call.arguments is not None, call
    validate(dict(call.arguments), schema)
