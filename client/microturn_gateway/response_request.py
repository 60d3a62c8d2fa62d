"""A request of the Responses API, read into typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from microturn_gateway.chat_tools import Tools, take_tools
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields
from microturn_gateway.logprobs import refuse_top_logprobs
from microturn_gateway.options import take_generation_options
from microturn_gateway.response_items import InputItem, parse_input

# What changes no answer of ours, shown in the response as it came, or else as here.
_INERT: Mapping[str, Any] = {
    "max_tool_calls": None,
    "metadata": {},
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "safety_identifier": None,
    "service_tier": "default",
    "user": None,
}
_SHOWN_OPTIONS: Mapping[str, float] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True)
class ResponseRequest:
    """What is asked for.

    Attributes:
        model: that is asked for; None for whichever there is.
        items: new ones of the conversation.
        instructions: of this response alone: those of the one before do not count.
        previous_id: of the response that this one goes on from; None begins a conversation.
        max_tokens: most tokens of the answer; None is as many as there is room for.
        generation: options of the turn, as the wire contract names them.
        tools: that the model may call.
        generates: whether there is an answer; otherwise the context is prepared for the next request.
        streams: whether the answer comes as it is made.
        is_stored: whether the response is kept, to go on from it.
        shown: fields of the request that its response shows.
    """

    model: str | None
    items: tuple[InputItem, ...]
    instructions: str | None
    previous_id: str | None
    max_tokens: int | None
    generation: Mapping[str, Any]
    tools: Tools
    generates: bool
    streams: bool
    is_stored: bool
    shown: Mapping[str, Any]


def parse_response_request(raw: Mapping[str, Any]) -> ResponseRequest:
    """Reads a request.

    Raises:
        Refusal: it asks for what is not here.
    """
    fields = Fields(raw)
    if fields.take("background", bool, False):
        raise Refusal("unsupported_parameter", "'background' is not supported here", param="background")
    logprobs = {"logprobs": True} if _LOGPROBS in fields.take("include", list, []) else {}
    refuse_top_logprobs(fields)
    fields.ignore("truncation")  # nothing is cut off, and the response says so
    stream_options = fields.take_object("stream_options")
    stream_options.ignore("include_obfuscation")
    stream_options.end()
    inert = {name: value for name, value in fields.take_inert(*_INERT).items() if value is not None}
    generates = fields.take("generate", bool, True)
    previous_id = fields.take("previous_response_id", str, None)
    begins = generates and previous_id is None
    asked_input = fields.take("input", (str, list)) if begins else fields.take("input", (str, list), [])
    if begins and not asked_input:
        raise Refusal("invalid_value", "'input' must not be empty", param="input")
    most = fields.take("max_output_tokens", int, None)
    if most is not None and most < 1:
        raise Refusal("invalid_value", "'max_output_tokens' must be 1 or more", param="max_output_tokens")
    text, grammar = _take_text(fields)
    tools = _take_tools(fields)
    options = take_generation_options(fields)
    request = ResponseRequest(
        model=fields.take("model", str, None),
        items=parse_input(asked_input),
        instructions=fields.take("instructions", str, None),
        previous_id=previous_id,
        max_tokens=most,
        generation={**options, **grammar, **tools.options, **logprobs},
        tools=tools,
        generates=generates,
        streams=fields.take("stream", bool, False),
        is_stored=fields.take("store", bool, True),
        shown={
            **_INERT,
            **inert,
            **{name: options.get(name, usual) for name, usual in _SHOWN_OPTIONS.items()},
            "reasoning": _take_reasoning(fields),
            "text": text,
            "tools": [_shown_tool(tool) for tool in raw.get("tools") or []],
            "tool_choice": raw.get("tool_choice") or "auto",
            "parallel_tool_calls": raw.get("parallel_tool_calls") is not False,
            "truncation": "disabled",
            "top_logprobs": 0,
        },
    )
    fields.end()
    return request


def _take_reasoning(fields: Fields) -> Mapping[str, Any] | None:
    """What is shown of it: both of its fields are required there."""
    asked = fields.take("reasoning", dict, None)
    return None if asked is None else {"effort": None, "summary": None, **asked}


def _take_text(fields: Fields) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What is shown of it, and what the answer must match, as the wire contract names it."""
    text = fields.take_object("text")
    verbosity = text.take("verbosity", str, None)
    shown, grammar = _take_format(text.take_object("format"))
    text.end()
    return {"format": shown, **({} if verbosity is None else {"verbosity": verbosity})}, grammar


def _take_format(asked: Fields) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    kind = asked.take("type", str, "text")
    shown: dict[str, Any] = {"type": kind}
    grammar: dict[str, Any] = {}
    if kind == "json_object":
        grammar = {"json_schema": {"type": "object"}}
    elif kind == "json_schema":
        grammar = {"json_schema": asked.take("schema", dict)}
        shown |= {
            "name": asked.take("name", str),
            "description": asked.take("description", str, None),
            "schema": grammar["json_schema"],
            "strict": asked.take("strict", bool, True),  # it is always enforced
        }
    elif kind != "text":
        path = asked.path("type")
        raise Refusal("invalid_value", f"'{path}' must be text, json_object or json_schema", param=path)
    asked.end()
    return shown, grammar


def _shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function as a response shows it: what it does not say is null there, not absent."""
    return {"description": None, "parameters": None, "strict": None, **tool}


def _take_tools(fields: Fields) -> Tools:
    """The tools of a request, in the shape that chat completions and chat templates have them."""
    described = [_as_in_chat(tool, f"tools.{index}") for index, tool in enumerate(fields.take("tools", list, []))]
    choice = fields.take("tool_choice", (str, dict), "auto")
    if isinstance(choice, Mapping):
        choice = _choice_as_in_chat(choice)
    is_parallel = fields.take("parallel_tool_calls", bool, True)
    return take_tools(Fields({"tools": described, "tool_choice": choice, "parallel_tool_calls": is_parallel}))


def _choice_as_in_chat(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    if choice.get("type") != "allowed_tools":
        return _as_in_chat(choice, "tool_choice")
    asked = Fields(choice, "tool_choice")
    asked.ignore("type")
    tools = [_as_in_chat(tool, f"tool_choice.tools.{index}") for index, tool in enumerate(asked.take("tools", list))]
    mode = asked.take("mode", str)
    asked.end()
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def _as_in_chat(tool: object, path: str) -> dict[str, Any]:
    asked = Fields(tool, path)
    _check_function(asked)
    asked.ignore("strict", "allowed_callers", "defer_loading", "output_schema")
    function = {"name": asked.take("name", str)}
    for name, kind in (("description", str), ("parameters", dict)):
        value = asked.take(name, kind, None)
        if value is not None:
            function[name] = value
    asked.end()
    return {"type": "function", "function": function}


def _check_function(fields: Fields) -> None:
    kind = fields.take("type", str)
    if kind != "function":
        path = fields.path("type")
        raise Refusal("unsupported_parameter", f"'{kind}' is not supported here: '{path}' must be function", param=path)
