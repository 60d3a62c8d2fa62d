"""What clients send to `/v1/responses`, read and checked, and the messages that it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from microturn_gateway.context import Message
from microturn_gateway.failures import Refusal
from microturn_gateway.response_items import Called, Returned, Said, check_results, messages_of, parse_input
from microturn_gateway.response_request import parse_response_request

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def test_items_become_what_the_model_reads() -> None:
    items = parse_input(
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Both"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Well. ", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x":1}', "status": "completed"},
            {"type": "function_call_output", "call_id": "b", "output": ""},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "1"}]},
        ]
    )
    assert messages_of("You help.", items) == [
        Message("system", "You help."),
        Message("system", "\nBe brief."),
        Message("user", "Both"),
        Message(
            "assistant",
            'Well.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
            '\n<tool_call>\n{"name": "g", "arguments": {"x": 1}}\n</tool_call>',
        ),
        Message("tool", "1"),
        Message("tool", "null"),
    ]


def test_a_conversation_begins_with_what_it_was_before() -> None:
    """So the session of the response before it holds it."""
    before = (Said("user", "a"), Called("1", "f", "{}"), Returned("1", "x"), Said("assistant", "b"))
    after = messages_of(None, (*before, Said("user", "c"), Said("user", "d")))
    assert after[:-2] == messages_of(None, before)


def test_what_changes_no_answer_is_shown_as_it_came() -> None:
    inert = {
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": None},
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    }
    verbose = {"verbosity": "low"}
    ignored = {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False}}
    request = parse_response_request({"input": "a", **inert, **ignored, "text": verbose, "background": False})
    assert {name: request.shown[name] for name in inert} == inert
    assert request.shown["text"] == {"format": {"type": "text"}, **verbose}
    assert (request.is_stored, request.streams, request.previous_id) == (True, False, None)
    assert request.items == (Said("user", "a"),)


def test_a_response_says_that_nothing_was_cut_off() -> None:
    """Frameworks send `auto`; an input that is too long is refused whatever they send."""
    assert parse_response_request({"input": "a", "truncation": "auto"}).shown["truncation"] == "disabled"


def test_what_responses_hold_can_be_sent_back() -> None:
    """OpenAI's and ours: log probabilities, annotations, refusals, what was parsed, the name of what was called."""
    logprobs = [{"token": "Well", "bytes": [], "logprob": -0.1, "top_logprobs": []}]
    cited = [{"type": "url_citation", "url": "https://a.example", "title": "A", "start_index": 0, "end_index": 1}]
    items = parse_input(
        [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {
                        "type": "output_text",
                        "text": "Well. ",
                        "annotations": cited,
                        "logprobs": logprobs,
                        "parsed": {"a": 1},
                    },
                    {"type": "refusal", "refusal": "No."},
                ],
            },
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}},
            {"type": "function_call_output", "call_id": "a", "name": "f", "output": "1", "created_by": "me"},
        ]
    )
    assert items == (Said("user", "a"), Said("assistant", "Well. No."), Called("a", "f", "{}"), Returned("a", "1"))


def test_of_the_tools_some_can_be_allowed() -> None:
    other = {**FUNCTION, "name": "g"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    request = parse_response_request({"input": "a", "tools": [FUNCTION, other], "tool_choice": choice})
    assert [tool["function"]["name"] for tool in request.tools.described] == ["g"]
    assert request.generation == {"tool_choice": "required"}
    assert request.shown["tool_choice"] == choice


def test_options_of_the_answer() -> None:
    asked = {"input": "a", "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 5, "store": False, "stream": True}
    request = parse_response_request({**asked, "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}})
    assert request.generation == {"temperature": 0.5, "top_p": 0.9, "tool_choice": "f"}
    assert (request.max_tokens, request.is_stored, request.streams) == (5, False, True)
    described = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert request.tools.described == (described,)


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        ({}, "missing_parameter", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"role": "narrator", "content": "a"}]}, "invalid_value", "input.0.role"),
        ({"input": [{"type": "item_reference"}]}, "missing_parameter", "input.0.id"),
        ({"input": [{"type": "web_search_call", "id": "a"}]}, "unsupported_parameter", "input.0.type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "unsupported_parameter",
            "input.0.content.0.type",
        ),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools.0.type"),
        ({"input": "a", "tool_choice": {"type": "mcp"}}, "unsupported_parameter", "tool_choice.type"),
        (
            {"input": "a", "tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}},
            "unsupported_parameter",
            "tool_choice.tools.0.type",
        ),
        ({"input": "a", "parallel_tool_calls": "no"}, "invalid_type", "parallel_tool_calls"),
        ({"input": "a", "tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"input": "a", "background": True}, "unsupported_parameter", "background"),
        ({"input": "a", "conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"input": "a", "prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"input": "a", "top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"input": "a", "max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "invalid_value", "text.format.type"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "missing_parameter", "text.format.schema"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}}}},
            "missing_parameter",
            "text.format.name",
        ),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(asked: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse_response_request(asked)
    assert (refused.value.code, refused.value.param) == (code, param)


def test_an_output_without_its_call_is_refused() -> None:
    """No chat template can say what it answers."""
    items = parse_input(
        [
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        ]
    )
    check_results(items[::-1])
    with pytest.raises(Refusal, match="no call 'a'") as refused:
        check_results(items)
    assert refused.value.param == "input"
