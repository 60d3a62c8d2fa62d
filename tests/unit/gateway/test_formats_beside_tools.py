"""A format beside tools, in chat completions and responses: the model calls a tool, or what it says has the format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from microturn_client.testing import FakeServer
from support.chats import gateway_before

STOP: dict[str, Any] = {"name": "stop", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "cloudy"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
QUESTIONS = [f"Question {number}" for number in range(12)]


@pytest.fixture
async def openai(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_before(FakeServer(), monkeypatch) as client:
        yield client


async def complete(openai: AsyncOpenAI, question: str, choice: str) -> tuple[str | None, list[str], str]:
    """What a chat completion says, the names of what it calls, and why it ended."""
    asked: Any = {
        "model": "fake",
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": STOP}],
        "tool_choice": {"type": "function", "function": {"name": "stop"}} if choice == "stop" else choice,
        "response_format": {"type": "json_schema", "json_schema": {"name": "report", "schema": SCHEMA, "strict": True}},
        "max_tokens": 200,
    }
    [answered] = (await openai.chat.completions.create(**asked)).choices
    calls = answered.message.tool_calls or []
    return answered.message.content, [call.function.name for call in calls], answered.finish_reason


async def respond(openai: AsyncOpenAI, question: str, choice: str) -> tuple[str | None, list[str], str]:
    """The same of a response."""
    asked: Any = {
        "model": "fake",
        "input": question,
        "tools": [{"type": "function", **STOP}],
        "tool_choice": {"type": "function", "name": "stop"} if choice == "stop" else choice,
        "text": {"format": {"type": "json_schema", "name": "report", "schema": SCHEMA, "strict": True}},
        "max_output_tokens": 200,
    }
    response = await openai.responses.create(**asked)
    assert response.status == "completed"
    names = [item.name for item in response.output if item.type == "function_call"]
    return response.output_text or None, names, "tool_calls" if names else "stop"


@pytest.fixture(params=[complete, respond])
def ask(request: pytest.FixtureRequest) -> Any:
    return request.param


def is_report(text: str | None) -> bool:
    return text is not None and json.loads(text) in ({"sky": "clear"}, {"sky": "cloudy"})


async def test_the_model_calls_a_tool_or_what_it_says_has_the_format(openai: AsyncOpenAI, ask: Any) -> None:
    """A request with tools and a format, as agents send it, could never have a tool called."""
    answers = [await ask(openai, question, "auto") for question in QUESTIONS]
    called = [answer for answer in answers if answer == (None, ["stop"], "tool_calls")]
    said = [(text, names, reason) for text, names, reason in answers if (text, names, reason) not in called]
    assert called
    assert said
    for text, names, reason in said:
        assert is_report(text)
        assert (names, reason) == ([], "stop")


@pytest.mark.parametrize("choice", ["required", "stop"])
async def test_where_a_call_is_forced_the_format_does_not_matter(openai: AsyncOpenAI, ask: Any, choice: str) -> None:
    """It was refused: both would say what the answer is."""
    for question in QUESTIONS[:4]:
        assert await ask(openai, question, choice) == (None, ["stop"], "tool_calls")


async def test_where_none_may_be_called_the_format_is_all_there_is(openai: AsyncOpenAI, ask: Any) -> None:
    for question in QUESTIONS:
        text, names, reason = await ask(openai, question, "none")
        assert is_report(text)
        assert (names, reason) == ([], "stop")
