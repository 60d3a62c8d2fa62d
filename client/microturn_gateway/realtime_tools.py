"""Tools of a realtime session: flat functions, and which of them an answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields

Tools = tuple[Mapping[str, Any], ...]
ToolChoice = str | Mapping[str, Any]

_CHOICES = ("none", "auto", "required")


def take_tools(fields: Fields) -> Tools | None:
    """The functions of a session or a response; None where it says nothing, or something wrong, which is refused."""
    tools: list[Any] | None = fields.take("tools", list, None)
    if tools is None:
        return None
    if all(_is_function(tool) for tool in tools):
        return tuple(tools)
    path = fields.path("tools")
    fields.refuse("unsupported_parameter", f"'{path}' must be functions, each with a 'name'", "tools")
    return None


def take_choice(fields: Fields) -> ToolChoice | None:
    """The `tool_choice`; None where there is none, or a wrong one, which is refused."""
    choice: Any = fields.take("tool_choice", (str, dict), None)
    if choice is None or choice in _CHOICES or (isinstance(choice, Mapping) and _is_function(choice)):
        return choice  # type: ignore[no-any-return]
    message = f"'{fields.path('tool_choice')}' must be one of {', '.join(_CHOICES)}, or a function"
    fields.refuse("unsupported_parameter", message, "tool_choice")
    return None


def described(tools: Tools) -> list[dict[str, Any]]:
    """For the chat template, as it knows tools."""
    return [
        {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
        for tool in tools
    ]


def check_choice(choice: ToolChoice | None, tools: Sequence[Mapping[str, Any]], param: str) -> None:
    """Whether these tools can be chosen from so.

    Raises:
        Refusal: they cannot.
    """
    if choice == "none" and tools:
        # The context tells the model of its tools from its beginning, and nothing forbids an answer to call them.
        raise Refusal("unsupported_parameter", f"'{param}' cannot be 'none' where there are tools", param=param)
    names = [tool["name"] for tool in tools]
    is_there = choice["name"] in names if isinstance(choice, Mapping) else choice != "required" or bool(names)
    if not is_there:
        raise Refusal("unsupported_parameter", f"'{param}' must be one of the session's tools", param=param)


def choice_options(choice: ToolChoice | None, tools: Tools) -> dict[str, Any]:
    """Options of the answer's turn."""
    if not tools or choice in (None, "auto"):
        return {}
    return {"tool_choice": choice["name"] if isinstance(choice, Mapping) else choice}


def _is_function(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "function" and isinstance(value.get("name"), str)
