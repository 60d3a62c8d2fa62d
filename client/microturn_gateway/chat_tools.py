"""Tools of chat completions: what a request says of them, and calls as messages and answers have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microturn_client import ToolArguments, ToolCall, ToolCallBegun, ToolEvent
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields

# A message without content has no place in the context, and a result must have one.
NO_RESULT = "null"

_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Tools:
    """What the model may call.

    Attributes:
        described: for the chat template, as the client describes them; none where nothing may be called.
        choice: ``auto``, ``required`` or the name of one.
        has_one_call: an answer calls once at most.
    """

    described: tuple[Mapping[str, Any], ...] = ()
    choice: str = "auto"
    has_one_call: bool = False

    @property
    def options(self) -> dict[str, str]:
        """Of the answer's turn."""
        return {} if self.choice == "auto" else {"tool_choice": self.choice}


def take_tools(fields: Fields) -> Tools:
    """The tools of a request.

    Raises:
        Refusal: one is no function, or the choice is none of them.
    """
    described = tuple(fields.take("tools", list, []))
    names = _names_of(described, "tools")
    has_one_call = not fields.take("parallel_tool_calls", bool, True)
    choice = fields.take("tool_choice", (str, dict), "auto")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, allowed = _take_allowed(choice, names)
        described = tuple(tool for tool, name in zip(described, names, strict=True) if name in allowed)
        names = allowed
    elif isinstance(choice, Mapping):
        choice = _name_of(choice, "tool_choice")
    elif choice not in _CHOICES:
        raise Refusal("invalid_value", f"'tool_choice' must be one of {', '.join(_CHOICES)}", param="tool_choice")
    if choice not in (*_CHOICES, *names) or (choice == "required" and not names):
        raise Refusal("invalid_value", "'tool_choice' must be one of the 'tools'", param="tool_choice")
    # A model that is told of no tools calls none.
    return Tools() if choice == "none" else Tools(described, choice, has_one_call)


def take_calls(fields: Fields) -> tuple[list[str], str]:
    """The calls of an assistant's message: their ids, and the text that they are of its content.

    Raises:
        Refusal: they are none.
    """
    ids, text = [], ""
    for index, call in enumerate(fields.take("tool_calls", list, [])):
        asked = Fields(call, f"{fields.path('tool_calls')}.{index}")
        asked.ignore("index", "type")
        ids.append(asked.take("id", str, ""))
        function = Fields(asked.take("function", dict), asked.path("function"))
        function.ignore("parsed_arguments")
        text += call_text(function.take("name", str), function.take("arguments", str, ""))
        function.end()
        asked.end()
    return ids, text


def call_text(name: str, arguments: str) -> str:
    """A call within the content of an answer, the same for the same call however its JSON is written.

    Where the server no longer has the answer, it is told again so: as Hermes and Qwen write calls.
    """
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = arguments
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': value}, ensure_ascii=False)}\n</tool_call>"


def as_openai(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Calls as a message has them."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}} for call in calls
    ]


def as_delta(event: ToolEvent, index: int) -> dict[str, Any] | None:
    """What a chunk says of a call's event; None where there is nothing new.

    Args:
        event: of the call.
        index: of the call in its answer.
    """
    match event:
        case ToolCallBegun():
            function = {"name": event.name, "arguments": ""}
            return {"index": index, "id": event.id, "type": "function", "function": function}
        case ToolArguments():
            return {"index": index, "function": {"arguments": event.json}}
        case ToolCall():
            return None


def _take_allowed(choice: Mapping[str, Any], names: Sequence[str]) -> tuple[str, list[str]]:
    """What must be called of some of the tools, and the names of these: the model is told of no others."""
    fields = Fields(choice, "tool_choice")
    fields.ignore("type")
    asked = Fields(fields.take("allowed_tools", dict), "tool_choice.allowed_tools")
    fields.end()
    mode, allowed = asked.take("mode", str), _names_of(asked.take("tools", list), asked.path("tools"))
    asked.end()
    if mode not in ("auto", "required") or not set(allowed) <= set(names):
        message = "'tool_choice' must allow some of the 'tools', with the mode auto or required"
        raise Refusal("invalid_value", message, param="tool_choice")
    return mode, allowed


def _names_of(tools: Sequence[object], path: str) -> list[str]:
    return [_name_of(tool, f"{path}.{index}") for index, tool in enumerate(tools)]


def _name_of(tool: object, path: str) -> str:
    described = Fields(tool, path)
    if described.take("type", str, "function") != "function":
        raise Refusal("unsupported_parameter", f"'{path}.type' must be function", param=f"{path}.type")
    function = Fields(described.take("function", dict), f"{path}.function")
    name: str = function.take("name", str)
    return name
