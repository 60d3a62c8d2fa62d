"""What responses and their events always have, be it null: the required fields of the Open Responses specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from microturn_client import Tokens, ToolArguments, ToolCall, ToolCallBegun
from microturn_gateway.answer import PromptCount
from microturn_gateway.failures import Refusal
from microturn_gateway.response_answer import ResponseAnswer
from microturn_gateway.response_request import parse_response_request
from support.simulated_context import status_of

RESPONSE = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text"),
    *("top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)
PART_PLACE = ("item_id", "output_index", "content_index")
EVENTS: Mapping[str, tuple[str, ...]] = {
    "response.created": ("response",),
    "response.in_progress": ("response",),
    "response.completed": ("response",),
    "response.incomplete": ("response",),
    "response.failed": ("response",),
    "response.output_item.added": ("output_index", "item"),
    "response.output_item.done": ("output_index", "item"),
    "response.content_part.added": (*PART_PLACE, "part"),
    "response.content_part.done": (*PART_PLACE, "part"),
    "response.output_text.delta": (*PART_PLACE, "delta"),
    "response.output_text.done": (*PART_PLACE, "text"),
    "response.function_call_arguments.delta": ("item_id", "output_index", "delta"),
    "response.function_call_arguments.done": ("item_id", "output_index", "arguments"),
}
ITEMS: Mapping[str, tuple[str, ...]] = {
    "message": ("id", "status", "role", "content"),
    "function_call": ("id", "call_id", "name", "arguments", "status"),
}
LASTS = {"response.completed", "response.incomplete", "response.failed"}
SCHEMA = {"type": "object"}


def events_of_an_answer(finish_reason: str = "stop", **asked: Any) -> list[dict[str, Any]]:
    """Text, a call, and the end."""
    answer = ResponseAnswer(parse_response_request({"input": "a", **asked}), "tiny")
    called = [ToolCallBegun("call_1", "f"), ToolArguments("call_1", "{}"), ToolCall("call_1", "f", {}, "{}")]
    events = answer.begin()
    for event in (Tokens("Well.", (1,), 1), *called):
        events += answer.take(event)
    return [*events, *answer.end(status_of(8, finish_reason=finish_reason), PromptCount(0))]


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_responses_events_and_items_have_all_fields(finish_reason: str) -> None:
    events = events_of_an_answer(finish_reason)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = "response.completed" if finish_reason == "stop" else "response.incomplete"
    assert {event["type"] for event in events} == EVENTS.keys() - (LASTS - {last})
    for event in events:
        assert set(EVENTS[event["type"]]) <= event.keys()
        if "response" in event:
            assert set(RESPONSE) <= event["response"].keys()
        if "item" in event:
            assert set(ITEMS[event["item"]["type"]]) <= event["item"].keys()


def test_a_failed_response_has_all_fields() -> None:
    answer = ResponseAnswer(parse_response_request({"input": "a"}), "tiny")
    [failed] = answer.failed(Refusal("internal", "It broke."))
    assert set(RESPONSE) <= failed["response"].keys()
    assert failed["response"]["error"] == {"code": "internal", "message": "It broke."}


def test_what_a_tool_does_not_say_is_null() -> None:
    [*_, last] = events_of_an_answer(tools=[{"type": "function", "name": "f"}])
    nothing = {"description": None, "parameters": None, "strict": None}
    assert last["response"]["tools"] == [{"type": "function", "name": "f", **nothing}]


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (None, None),
        ({}, {"effort": None, "summary": None}),
        ({"effort": "low"}, {"effort": "low", "summary": None}),
    ],
)
def test_reasoning_has_both_fields_or_is_null(asked: Any, shown: Any) -> None:
    assert parse_response_request({"input": "a", "reasoning": asked}).shown["reasoning"] == shown


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (None, {"format": {"type": "text"}}),
        ({"format": None, "verbosity": None}, {"format": {"type": "text"}}),
        (
            {"format": {"type": "json_object"}, "verbosity": "low"},
            {"format": {"type": "json_object"}, "verbosity": "low"},
        ),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": None}},
            {"format": {"type": "json_schema", "name": "n", "description": None, "schema": SCHEMA, "strict": True}},
        ),
    ],
)
def test_the_format_of_text_has_all_fields(asked: Any, shown: Any) -> None:
    assert parse_response_request({"input": "a", "text": asked}).shown["text"] == shown
