"""Requests for chat completions, as frameworks write them."""

from __future__ import annotations

from typing import Any

import pytest

from microturn_gateway.chat_request import ChatRequest, parse_chat_request
from microturn_gateway.chat_tools import Tools
from microturn_gateway.context import Message
from microturn_gateway.failures import Refusal


def parsed(**fields: Any) -> ChatRequest:
    return parse_chat_request({"messages": [{"role": "user", "content": "Hello"}], **fields})


def test_all_that_means_something_here() -> None:
    asked = parsed(
        model="tiny",
        max_completion_tokens=9,
        max_tokens=8,
        temperature=0,
        top_p=0.5,
        stop="END",
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        user="somebody",
        n=1,
        store=False,
        metadata={"a": "b"},
        tools=[],
        response_format={"type": "text"},
    )
    assert asked == ChatRequest(
        model="tiny",
        messages=(Message("user", "Hello"),),
        max_tokens=9,
        generation={"temperature": 0, "top_p": 0.5, "ignore_eos": True, "stop": ["END"]},
        tools=Tools(),
        streams=True,
        includes_usage=True,
    )


def test_messages_of_all_roles_and_of_parts() -> None:
    asked = parsed(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "name": "Ann",
                "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "."}],
            },
            {"role": "user", "content": "Two."},
            {"role": "assistant", "content": None},
            {"role": "tool", "content": "3", "tool_call_id": "x"},
        ]
    )
    assert asked.messages == (
        Message("system", "Be brief."),
        Message("user", "One."),
        Message("user", "\nTwo."),
        Message("tool", "3"),
    )


@pytest.mark.parametrize(
    "inert",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"logprobs": False, "top_logprobs": 0},
        {"tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "none", "tools": [], "functions": None},
        {"modalities": ["text"], "audio": {"voice": "cedar", "format": "wav"}},
        {"prediction": {"type": "content", "content": "Hi"}, "prompt_cache_options": {"ttl": "30m"}},
        {"prompt_cache_key": "talk", "safety_identifier": "ann", "reasoning_effort": "low", "verbosity": "low"},
        {"priority": 1, "request_id": "r"},
    ],
)
def test_what_changes_no_answer_is_accepted(inert: dict[str, Any]) -> None:
    assert parsed(**inert) == parsed()


def test_what_changes_no_message_is_accepted() -> None:
    part = {"type": "text", "text": "One.", "cache_control": {"type": "ephemeral"}, "id": "lc_1"}
    asked = parsed(
        messages=[
            {"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}},
            {
                "role": "assistant",
                "content": "Two.",
                "reasoning_content": "The number behind one.",
                "reasoning": "The same.",
                "thinking_blocks": [{"type": "thinking", "thinking": "The same."}],
                "provider_specific_fields": {"refusal": None},
                "tool_calls": [],
                "function_call": None,
                "audio": None,
            },
        ]
    )
    assert asked.messages == (Message("user", "One."), Message("assistant", "Two."))


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "invalid_value", "messages"),
        ({"messages": "Hello"}, "invalid_type", "messages"),
        ({"messages": [{"role": "cat", "content": ""}]}, "invalid_value", "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "unsupported_parameter",
            "messages.0.content.0.type",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "missing_parameter",
            "messages.0.tool_calls.0.function",
        ),
        ({"n": 2}, "invalid_value", "n"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"tools": [{}]}, "missing_parameter", "tools.0.function"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools.0.type"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "always"}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "missing_parameter", "tool_choice.allowed_tools"),
        ({"parallel_tool_calls": 1}, "invalid_type", "parallel_tool_calls"),
        ({"top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"prompt": {"id": "pmpt_1"}}, "unsupported_parameter", "prompt"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_parameter", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            "invalid_type",
            "response_format.json_schema.schema",
        ),
        ({"logit_bias": [1]}, "invalid_type", "logit_bias"),
        ({"temprature": 1}, "unsupported_parameter", "temprature"),
        ({"stop": [1]}, "invalid_type", "stop"),
        ({"temperature": True}, "invalid_type", "temperature"),
    ],
)
def test_what_is_not_here_is_refused_by_name(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        parsed(**fields)
    assert (refused.value.code, refused.value.param) == (code, param)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("response_format", "grammar"),
    [
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"json_schema": {"type": "object"}}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            {"json_schema": SCHEMA},
        ),
        ({"type": "json_schema", "json_schema": {"name": "anything"}}, {"json_schema": {}}),
    ],
)
def test_a_response_format_is_a_grammar_of_the_answer(response_format: dict[str, Any], grammar: dict[str, Any]) -> None:
    assert parsed(response_format=response_format).generation == grammar


def test_biases_are_handed_on() -> None:
    assert parsed(logit_bias={"50": -100}).generation == {"logit_bias": {"50": -100}}


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("auto", Tools((ADD,))),
        ("none", Tools()),
        ("required", Tools((ADD,), "required")),
        ({"type": "function", "function": {"name": "add"}}, Tools((ADD,), "add")),
    ],
)
def test_tools_and_the_choice_among_them(choice: Any, tools: Tools) -> None:
    asked = parsed(tools=[ADD], tool_choice=choice, parallel_tool_calls=True)
    assert asked.tools == tools
    assert asked.generation == tools.options


SUB = {"type": "function", "function": {"name": "sub"}}


def allowed(*names: str, mode: str = "auto", **more: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools, **more}}


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        (allowed("add"), Tools((ADD,))),
        (allowed("sub", mode="required"), Tools((SUB,), "required")),
        (allowed("sub", "add"), Tools((ADD, SUB))),
        (allowed(), Tools()),
    ],
)
def test_of_the_tools_some_can_be_allowed(choice: Any, tools: Tools) -> None:
    assert parsed(tools=[ADD, SUB], tool_choice=choice).tools == tools


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        (allowed("mul"), "invalid_value", "tool_choice"),
        (allowed(mode="required"), "invalid_value", "tool_choice"),
        (allowed("add", mode="none"), "invalid_value", "tool_choice"),
        (allowed("add", strict=True), "unsupported_parameter", "tool_choice.allowed_tools.strict"),
    ],
)
def test_what_of_the_tools_cannot_be_allowed(choice: Any, code: str, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        parsed(tools=[ADD, SUB], tool_choice=choice)
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize(("said", "has_one_call"), [({}, False), ({"parallel_tool_calls": False}, True)])
def test_a_request_may_want_one_call_at_most(said: dict[str, Any], has_one_call: bool) -> None:
    assert parsed(tools=[ADD], **said).tools.has_one_call is has_one_call


def call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_calls_are_part_of_what_was_said_however_their_json_is_written() -> None:
    texts = []
    for arguments in ('{"a": 1, "b": "ü"}', '{"a":1,"b":"\\u00fc"}'):
        message = {"role": "assistant", "content": "Let me see. ", "tool_calls": [call("x", arguments)]}
        (said,) = parsed(messages=[message]).messages
        texts.append(said.content)
    expected = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
    assert texts == [expected, expected]


def test_results_are_messages_of_their_own_in_the_order_of_the_calls() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [call("x", "{}"), call("y", "{}")]}
    results = [("y", "two"), ("x", "one"), ("z", "")]
    told = [{"role": "tool", "tool_call_id": call_id, "content": content} for call_id, content in results]
    messages = parsed(messages=[calls, *told, {"role": "user", "content": "So?"}]).messages
    assert [(message.role, message.content) for message in messages[1:]] == [
        ("tool", "one"),
        ("tool", "two"),
        ("tool", "null"),
        ("user", "So?"),
    ]
