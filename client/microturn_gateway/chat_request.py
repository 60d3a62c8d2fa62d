"""A request for a chat completion, read into typed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microturn_client import MessageRole
from microturn_gateway.chat_tools import NO_RESULT, Tools, take_calls, take_tools
from microturn_gateway.context import Message
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields, read_text
from microturn_gateway.logprobs import refuse_top_logprobs
from microturn_gateway.options import take_generation_options

_ROLES: Mapping[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

# What frameworks send along and what changes nothing in an answer of ours.
_WITHOUT_MEANING = (
    *("user", "store", "metadata", "service_tier", "safety_identifier", "verbosity"),
    *("prompt_cache_key", "prompt_cache_retention", "reasoning_effort"),
    *("prompt_cache_options", "prediction", "audio", "chat_template_kwargs", "priority", "request_id"),
)
_WITHOUT_MEANING_IN_A_MESSAGE = (
    *("name", "refusal", "annotations", "cache_control", "provider_specific_fields", "parsed"),
    *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks"),  # templates leave out what was thought
)


@dataclass(frozen=True)
class ChatRequest:
    """What is asked for.

    Attributes:
        model: that is asked for; None for whichever there is.
        messages: the whole conversation.
        max_tokens: most tokens of the answer; None is as many as there is room for.
        generation: options of the turn, as the wire contract names them.
        tools: that the model may call.
        streams: whether the answer comes as it is made.
        includes_usage: whether the stream ends with the numbers of tokens.
    """

    model: str | None
    messages: tuple[Message, ...]
    max_tokens: int | None
    generation: Mapping[str, Any]
    tools: Tools
    streams: bool
    includes_usage: bool


def parse_chat_request(raw: Mapping[str, Any]) -> ChatRequest:
    """Reads a request.

    Raises:
        Refusal: it asks for what is not here.
    """
    fields = Fields(raw)
    fields.ignore(*_WITHOUT_MEANING)
    model = fields.take("model", str, None)
    messages = fields.take("messages", list)
    parsed = as_lines(_parse_messages(messages))
    if not parsed:
        raise Refusal("invalid_value", "'messages' must have text", param="messages")
    most = fields.take("max_completion_tokens", int, None)
    older = fields.take("max_tokens", int, None)
    most = older if most is None else most
    if most is not None and most < 1:
        raise Refusal("invalid_value", "'max_tokens' must be 1 or more", param="max_tokens")
    fields.take_int("n", 1, 1, 1)
    logprobs = {"logprobs": True} if fields.take("logprobs", bool, False) else {}
    refuse_top_logprobs(fields)
    if fields.take("modalities", list, ["text"]) != ["text"]:
        raise Refusal("unsupported_parameter", "'modalities' must be [\"text\"]: answers are text", param="modalities")
    grammar = _take_response_format(fields)
    tools = take_tools(fields)
    stream_options = Fields(fields.take("stream_options", dict, {}), "stream_options")
    stream_options.ignore("include_obfuscation")
    request = ChatRequest(
        model=model,
        messages=tuple(parsed),
        max_tokens=most,
        generation={**take_generation_options(fields), **grammar, **tools.options, **logprobs},
        tools=tools,
        streams=fields.take("stream", bool, False),
        includes_usage=stream_options.take("include_usage", bool, False),
    )
    stream_options.end()
    fields.end()
    return request


def _take_response_format(fields: Fields) -> dict[str, Any]:
    """What the answer must match, as the wire contract names it."""
    asked = Fields(fields.take("response_format", dict, {"type": "text"}), "response_format")
    kind = asked.take("type", str)
    if kind not in ("text", "json_object", "json_schema"):
        message = "'response_format.type' must be text, json_object or json_schema"
        raise Refusal("invalid_value", message, param="response_format.type")
    grammar: dict[str, Any] = {"json_object": {"json_schema": {"type": "object"}}}.get(kind, {})
    if kind == "json_schema":
        described = Fields(asked.take("json_schema", dict), "response_format.json_schema")
        described.ignore("name", "description", "strict")  # it is always enforced
        grammar = {"json_schema": described.take("schema", dict, {})}
        described.end()
    asked.end()
    return grammar


def _parse_messages(values: Sequence[object]) -> list[Message]:
    """Messages in their order, but results of tools in that of the calls: a chat template does not tell them apart."""
    messages: list[Message] = []
    results: list[tuple[int, Message]] = []
    call_ids: list[str] = []
    for index, value in enumerate(values):
        fields = Fields(value, f"messages.{index}")
        call_id = fields.take("tool_call_id", str, "")
        ids, message = _parse_message(fields)
        if message.role == "tool":
            results.append((call_ids.index(call_id) if call_id in call_ids else len(call_ids), message))
            continue
        messages += _in_order(results)
        results, call_ids = [], ids
        messages.append(message)
    return messages + _in_order(results)


def _in_order(results: Sequence[tuple[int, Message]]) -> list[Message]:
    return [message for _, message in sorted(results, key=lambda result: result[0])]


def _parse_message(fields: Fields) -> tuple[list[str], Message]:
    """A message, and the ids of the calls in it."""
    fields.ignore(*_WITHOUT_MEANING_IN_A_MESSAGE)
    role = fields.take("role", str)
    if role not in _ROLES:
        path = fields.path("role")
        raise Refusal("invalid_value", f"'{path}' must be one of {', '.join(_ROLES)}", param=path)
    content = fields.take("content", (str, list), "")
    if isinstance(content, list):
        content = read_text(content, fields.path("content"), ("text", "refusal"))
    ids, calls = take_calls(fields)
    if calls:
        content = content.strip() + calls
    if role == "tool":
        content = content or NO_RESULT
    fields.end()
    return ids, Message(_ROLES[role], content)


def as_lines(messages: list[Message]) -> list[Message]:
    """Messages of one role that follow each other, as lines of one; each result of a tool is a message of its own."""
    lined: list[Message] = []
    for message in messages:
        if message.content and lined and lined[-1].role == message.role != "tool":
            lined.append(Message(message.role, f"\n{message.content}"))
        elif message.content:
            lined.append(message)
    return lined
