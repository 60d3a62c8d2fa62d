"""`parallel_tool_calls: false`: one call at most, whatever the model writes behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from microturn_client.testing import FakeServer, _fake_values
from support.chats import gateway_before

FLAT: dict[str, Any] = {"type": "function", "name": "look", "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
QUESTION: dict[str, Any] = {"role": "user", "content": "Look twice."}


@pytest.fixture
async def openai(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    """Its model calls twice in each answer."""
    call = f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {}})}\n</tool_call>"
    monkeypatch.setattr(_fake_values, "_calls", lambda _choice, _tools: [f"{call}\n{call}".encode()])
    async with gateway_before(FakeServer(), monkeypatch, max_sessions=4) as client:
        yield client


@pytest.mark.parametrize(("is_parallel", "num_calls"), [(True, 2), (False, 1)])
async def test_a_chat_completion_has_one_call(openai: AsyncOpenAI, is_parallel: bool, num_calls: int) -> None:
    messages: list[Any] = [QUESTION]
    for _ in range(2):
        completion = await openai.chat.completions.create(
            model="fake", messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=is_parallel
        )
        [choice] = completion.choices
        calls = choice.message.tool_calls or []
        assert (choice.finish_reason, len(calls)) == ("tool_calls", num_calls)
        results = [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in calls]
        messages += [choice.message, *results]


async def test_a_stream_of_chunks_has_one_call(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model="fake", messages=[QUESTION], tools=[TOOL], tool_choice="required", parallel_tool_calls=False, stream=True
    )
    choices = [chunk.choices[0] async for chunk in stream]
    told = [call for choice in choices for call in choice.delta.tool_calls or []]
    assert {call.index for call in told} == {0}
    assert "".join(call.function.arguments or "" for call in told if call.function) == "{}"
    assert choices[-1].finish_reason == "tool_calls"


async def test_a_response_has_one_call_and_is_gone_on_from(openai: AsyncOpenAI) -> None:
    """What the model called behind it is not in the conversation, and not in the context of the next answer."""
    asked: dict[str, Any] = {"model": "fake", "tools": [FLAT], "tool_choice": "required"}
    one = await openai.responses.create(input="Look twice.", parallel_tool_calls=False, **asked)
    assert (one.status, one.parallel_tool_calls) == ("completed", False)
    [call] = one.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
    gone_on = await openai.responses.create(input=[result], previous_response_id=one.id, **asked)
    told = [{"role": "user", "content": "Look twice."}, call.to_dict(), result]
    anew = await openai.responses.create(
        input=told, store=False, extra_headers={"authorization": "Bearer two"}, **asked
    )
    assert gone_on.usage is not None
    assert anew.usage is not None
    assert gone_on.usage.input_tokens == anew.usage.input_tokens
    assert len(gone_on.output) == 2
