"""The unmodified OpenAI SDK has a realtime session call tools, and tells it their results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from support.tool_contract import CITIES, WEATHER

TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"]}
FORCED: dict[str, Any] = {"type": "function", "name": "get_weather"}


@pytest.fixture
async def connection(tool_gateway: str) -> AsyncIterator[AsyncRealtimeConnection]:
    async with AsyncOpenAI(api_key="any", base_url=f"http://{tool_gateway}/v1", max_retries=0) as openai:
        model = (await openai.models.list()).data[0].id
        async with openai.realtime.connect(model=model) as connection:
            await connection.session.update(session={"type": "realtime", "tools": [TOOL], "max_output_tokens": 100})
            updated = (await until(connection, "session.updated"))[-1]
            assert updated.session.tools[0].name == "get_weather"
            yield connection


async def until(connection: AsyncRealtimeConnection, kind: str) -> list[Any]:
    """The events up to the next one of this type."""
    events: list[Any] = []
    async with asyncio.timeout(60):
        while not events or events[-1].type != kind:
            events.append(await connection.recv())
    return events


async def call(connection: AsyncRealtimeConnection) -> list[Any]:
    """The events of an answer that has to call."""
    content: Any = [{"type": "input_text", "text": "How warm is it in Bern?"}]
    await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
    await connection.response.create(response={"tool_choice": FORCED})  # type: ignore[typeddict-item]
    return await until(connection, "response.done")


async def test_a_forced_call_streams_and_matches_its_schema(connection: AsyncRealtimeConnection) -> None:
    events = await call(connection)
    response = events[-1].response
    assert response.status == "completed"
    [item] = response.output
    assert (item.type, item.name, item.status) == ("function_call", "get_weather", "completed")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == item.arguments
    arguments = json.loads(item.arguments)
    assert arguments["city"] in CITIES
    assert 1 <= arguments["days"] <= 9


async def test_after_a_result_only_the_result_and_the_template_are_computed(
    connection: AsyncRealtimeConnection,
) -> None:
    first = (await call(connection))[-1].response
    result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "21 degrees"}
    await connection.conversation.item.create(item=result)
    await connection.response.create(response={"max_output_tokens": 8})
    events = await until(connection, "response.done")
    told = next(event for event in events if event.type == "conversation.item.done")
    assert told.item.type == "function_call_output"
    second = events[-1].response
    assert second.usage.input_tokens - first.usage.total_tokens < 40
    assert second.microturn["kv"] == "in place"
    assert second.microturn["computed_tokens"] - second.usage.output_tokens < 40
    assert second.usage.output_tokens > 0


async def test_other_tools_begin_the_context_anew_with_all_that_was_said(connection: AsyncRealtimeConnection) -> None:
    first = (await call(connection))[-1].response
    other: Any = {"type": "function", "name": "other", "parameters": {"type": "object", "additionalProperties": False}}
    await connection.session.update(session={"type": "realtime", "tools": [other]})
    await until(connection, "session.updated")
    result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "21 degrees"}
    await connection.conversation.item.create(item=result)
    await connection.response.create(response={"tool_choice": "required"})
    second = (await until(connection, "response.done"))[-1].response
    assert [item.name for item in second.output] == ["other"]
    assert second.usage.input_tokens > first.usage.output_tokens + 20


async def test_a_cancel_within_a_calls_arguments_leaves_a_conversation_that_goes_on(
    connection: AsyncRealtimeConnection,
) -> None:
    """The answer may be over before the cancel comes to the server: then it is complete, and there is an error."""
    content: Any = [{"type": "input_text", "text": "How warm is it in Bern?"}]
    await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
    await connection.response.create(response={"tool_choice": FORCED})  # type: ignore[typeddict-item]
    begun = await until(connection, "response.function_call_arguments.delta")
    await connection.response.cancel()
    ended = await until(connection, "response.done")
    response = ended[-1].response
    [item] = response.output
    assert (item.type, item.name) == ("function_call", "get_weather")
    deltas = [event.delta for event in begun + ended if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == item.arguments
    if response.status == "cancelled":
        assert item.status == "incomplete"
    again = (await call(connection))[-1].response
    assert (again.status, again.output[0].status) == ("completed", "completed")
    assert again.microturn["kv"] == "in place"
