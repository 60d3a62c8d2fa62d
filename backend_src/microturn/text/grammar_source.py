"""Grammars as options say them, and as llguidance reads them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from microturn.errors import InvalidArgument

# Options that say what an answer in text is. Beside one of them `tool_choice` says whether it may be calls instead.
FORMATS = ("json_schema", "regex", "grammar", "choice")
KINDS = (*FORMATS, "tool_choice")

MAX_SOURCE_LEN = 1 << 16

# Of the lexer of one long answer, some 1.5 kB each. A text with a bound takes one for each of its bytes.
MAX_OWN_LEXER_STATES = 50_000

_MAX_REASON_LEN = 300

_VALUES = ("const", "enum", "default", "examples")  # of a schema, what is no schema

# As json.dumps writes it, which models have seen most. Free whitespace would let a small model write nothing else.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as an option says it.

    Attributes:
        kind: the option's name, one of `KINDS`.
        text: its value.
        tools: those that `tool_choice` chooses from, which are the session's.
    """

    kind: str
    text: str
    tools: str = ""


def check_names(names: Collection[str]) -> None:
    """Checks which options about grammars come together.

    Raises:
        InvalidArgument: two formats, or the beginning of a value without a grammar.
    """
    formats = sorted({*names} & {*FORMATS})
    if len(formats) > 1:
        raise InvalidArgument(f"'{formats[0]}' and '{formats[1]}' both say what the answer is: give one")
    if "grammar_from" in names and not {*names} & {*KINDS}:
        raise InvalidArgument(f"'grammar_from' comes with one of {', '.join(KINDS)}")


def as_llguidance(source: GrammarSource) -> str:
    """A grammar as the library writes it; that of `tool_choice` depends on the model: see `tool_formats`.

    Raises:
        InvalidArgument: it is no JSON, or no JSON object, where it should be.
    """
    try:
        match source.kind:
            case "json_schema":
                schema = json.loads(source.text)
                if not isinstance(schema, dict):
                    raise ValueError("a schema is a JSON object")
                if _least_text_len(schema) >= MAX_OWN_LEXER_STATES:
                    raise ValueError(f"a minLength of {MAX_OWN_LEXER_STATES} or more cannot be counted")
                return LLMatcher.grammar_from_json_schema(source.text, defaults=JSON_STYLE)
            case "regex":
                return LLMatcher.grammar_from_regex(source.text)
            case "grammar":
                return LLMatcher.grammar_from_lark(source.text)
            case _:
                # JSON leaves DEL as it is, and no string in Lark's notation has it.
                choices = (
                    json.dumps(choice, ensure_ascii=False).replace("\x7f", r"\u007f")
                    for choice in json.loads(source.text)
                )
                return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
    except json.JSONDecodeError as error:
        raise refusal(source, f"it is not JSON: {error}") from None
    except RecursionError:
        raise refusal(source, "its JSON is nested too deeply") from None
    except ValueError as error:
        raise refusal(source, str(error)) from None


def _least_text_len(schema: Any) -> float:
    """The greatest `minLength` in a schema."""
    greatest, parts = 0.0, [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            least = part.get("minLength")
            greatest = max(greatest, least) if isinstance(least, int | float) else greatest
            parts += [inner for name, inner in part.items() if name not in _VALUES]
    return greatest


def refusal(source: GrammarSource, reason: str) -> InvalidArgument:
    """Why a grammar is refused, in a sentence for its turn's client."""
    return InvalidArgument(f"option '{source.kind}' is refused: {_one_line(reason)}")


def _one_line(reason: str) -> str:
    """What the library says, in one line that an error can carry."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:_MAX_REASON_LEN]
