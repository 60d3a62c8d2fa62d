"""The unmodified OpenAI SDK asks the real server for responses over one WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.resources.responses.responses import AsyncResponsesConnection
from openai.types.responses.responses_server_event import ResponseWsCreated

from support.tool_contract import CITIES, WEATHER

INSTRUCTIONS = "You answer in one short sentence, and you never say more than you know."
QUESTION = "What is the capital of France?"
TOOL: dict[str, Any] = {"type": "function", "strict": True, **WEATHER["function"]}
LASTS = ("response.completed", "response.incomplete", "response.failed", "error")


@pytest.fixture
async def connection(tool_openai: AsyncOpenAI) -> AsyncIterator[AsyncResponsesConnection]:
    """Of a caller of its own, who has no sessions here."""
    async with tool_openai.with_options(api_key=uuid4().hex).responses.connect() as connection:
        yield connection


async def ask(connection: AsyncResponsesConnection, said: Any, previous: Any = None, **options: Any) -> Any:
    options = {"max_output_tokens": 8, "instructions": INSTRUCTIONS, "store": False, **options}
    if previous is not None:
        options["previous_response_id"] = previous.id
    await connection.response.create(input=said, **options)
    while (event := await connection.recv()).type not in LASTS:
        pass
    return event.error if event.type == "error" else event.response


def cached(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


def text_of(response: Any) -> str:
    return str(response.output[0].content[0].text)


async def test_each_turn_computes_only_what_is_new_though_nothing_is_stored(
    connection: AsyncResponsesConnection,
) -> None:
    first = await ask(connection, QUESTION)
    second = await ask(connection, "And of Spain?", first)
    assert cached(second) >= first.usage.total_tokens - 2
    said = [
        {"role": "user", "content": QUESTION},
        first.output[0].to_dict(),
        {"role": "user", "content": "And of Spain?"},
    ]
    fresh = await ask(connection, said, store=True)
    assert cached(fresh) == 0
    assert text_of(fresh) == text_of(second)


async def test_what_is_prepared_is_there_when_the_question_comes(connection: AsyncResponsesConnection) -> None:
    warm = await ask(connection, [], tools=[TOOL], generate=False)
    assert (warm.status, warm.output, warm.usage.output_tokens) == ("completed", [], 0)
    answer = await ask(connection, QUESTION, warm, tools=[TOOL])
    assert cached(answer) == warm.usage.input_tokens > 20
    assert text_of(answer) == text_of(await ask(connection, QUESTION, tools=[TOOL], store=True))


async def test_a_tool_is_called_and_its_result_is_all_that_is_new(connection: AsyncResponsesConnection) -> None:
    forced = {"type": "function", "name": TOOL["name"]}
    called = await ask(connection, "How warm is it?", tools=[TOOL], tool_choice=forced, max_output_tokens=60)
    [call] = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in CITIES
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    answer = await ask(connection, [result], called, tools=[TOOL])
    assert cached(answer) >= called.usage.total_tokens - 2


async def test_closing_interrupts(tool_openai: AsyncOpenAI) -> None:
    async with tool_openai.responses.connect() as connection:
        endless = {"input": QUESTION, "max_output_tokens": 1500, "ignore_eos": True}
        await connection.send_raw(json.dumps({"type": "response.create", **endless}))
        created = await connection.recv()
        assert isinstance(created, ResponseWsCreated)
        while (await connection.recv()).type != "response.output_text.delta":
            pass
    async with asyncio.timeout(30):
        while True:
            try:
                response = await tool_openai.responses.retrieve(created.response.id)
                break
            except sdk.NotFoundError:
                await asyncio.sleep(0.05)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "interrupted"
