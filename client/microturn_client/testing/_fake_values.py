"""What the fake server answers where an answer must match something: a choice, a value of the schema, a tool call.

It knows the schemas that programs have most: objects, arrays, texts, numbers, and what is one of some constants. What
else a real server knows (``regex``, ``grammar``, other keywords) it refuses, rather than answer what does not match.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from microturn_client.testing._fake_model import encode, next_token

FORMATS = ("json_schema", "regex", "grammar", "choice")
KINDS = (*FORMATS, "tool_choice")
GRAMMAR = (*KINDS, "grammar_from")

_ANNOTATIONS = {"title", "description", "default", "examples", "$schema"}
_KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems"),
    *("enum", "const", "anyOf", "minLength", "maxLength", "minimum", "maximum"),
}


class UnknownError(ValueError):
    """Why a value cannot be made up; the message says so to a client."""


def possible_values(options: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[bytes] | None:
    """Some of the values that a turn's answer may be; None where it may be anything.

    Args:
        options: of the turn.
        tools: of its session.

    Raises:
        UnknownError: the options say nothing, too much, or what only a real server knows.
    """
    choice, said = options.get("tool_choice", "auto"), [kind for kind in FORMATS if kind in options]
    if "grammar_from" in options and not options.keys() & {*KINDS}:
        raise UnknownError(f"'grammar_from' comes with one of {', '.join(KINDS)}")
    if len(said) > 1:
        raise UnknownError(f"'{said[0]}' and '{said[1]}' both say what the answer is: give one")
    if choice not in ("auto", "none"):
        return _calls(choice, tools)
    if not said:
        return None
    values = _values_of(said[0], options)
    return [*values, *_calls("required", tools)] if tools and choice == "auto" else values


def chosen_value(values: Sequence[bytes], context: Sequence[int], start: int, seed: int) -> list[int] | None:
    """The ids that go on with a value that began at ``start``; None where the context is no beginning of one."""
    so_far = context[start:]
    fitting = [ids for value in values if (ids := encode(value.decode()))[: len(so_far)] == [*so_far]]
    fitting = [ids for ids in fitting if len(ids) > len(so_far)]
    if not fitting:
        return None
    # The one that would have come anyway, if it begins so.
    first = encode(values[next_token(context[:start], seed) % len(values)].decode())
    return (first if first in fitting else fitting[0])[len(so_far) :]


def _values_of(kind: str, options: Mapping[str, Any]) -> list[bytes]:
    if kind not in ("json_schema", "choice"):
        raise UnknownError(f"option '{kind}': the fake server knows only json_schema, choice and tool_choice")
    try:
        parsed = json.loads(options[kind])
    except ValueError as error:
        raise UnknownError(f"option '{kind}' is refused: it is not JSON: {error}") from None
    if kind == "json_schema":
        return [json.dumps(value, ensure_ascii=False).encode() for value in _values(parsed)]
    if not isinstance(parsed, list) or not parsed or not all(isinstance(text, str) and text for text in parsed):
        raise UnknownError("option 'choice' is a JSON list of strings")
    return [text.encode() for text in parsed]


def _calls(choice: str, tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Calls as Hermes and Qwen write them."""
    functions = [tool.get("function", tool) for tool in tools]
    chosen = [function for function in functions if choice in ("required", function["name"])]
    if not chosen:
        raise UnknownError(f"tool_choice='{choice}', and the session has no such tool")
    calls = [
        {"name": function["name"], "arguments": value}
        for function in chosen
        for value in _values(function.get("parameters") or {"type": "object"})
    ]
    return [f"<tool_call>\n{json.dumps(call)}\n</tool_call>".encode() for call in calls]


def _values(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        raise UnknownError("option 'json_schema' is refused: a schema is a JSON object")
    if unknown := sorted(schema.keys() - _KEYWORDS - _ANNOTATIONS):
        raise UnknownError(f"option 'json_schema': the fake server does not know '{unknown[0]}'")
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    if "anyOf" in schema:
        return [value for part in schema["anyOf"] for value in _values(part)]
    kinds = schema.get("type", "object")
    return [value for kind in (kinds if isinstance(kinds, list) else [kinds]) for value in _of_kind(kind, schema)]


def _of_kind(kind: str, schema: dict[str, Any]) -> list[Any]:
    match kind:
        case "object":
            parts = {name: _values(part)[0] for name, part in schema.get("properties", {}).items()}
            required = {name: value for name, value in parts.items() if name in schema.get("required", ())}
            return [parts] if parts == required else [parts, required]
        case "array":
            item = _values(schema.get("items", {}))[0]
            least = schema.get("minItems", 0)
            return [[item] * num_items for num_items in {least, min(least + 1, schema.get("maxItems", least + 1))}]
        case "string":
            return [("text" * 64)[: max(schema.get("minLength", 0), min(4, schema.get("maxLength", 4)))]]
        case "integer" | "number":
            return [schema.get("minimum", min(1, schema.get("maximum", 1)))]
        case "boolean":
            return [True, False]
        case "null":
            return [None]
        case _:
            raise UnknownError(f"option 'json_schema' is refused: Invalid type: {kind}")
