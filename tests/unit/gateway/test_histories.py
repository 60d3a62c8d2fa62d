"""What the unmodified OpenAI SDK makes of answers is sent back as it is, in the loops of its documentation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from microturn_client.testing import FakeServer
from support.chats import gateway_before


class Plant(BaseModel):
    """Something to plant."""

    name: str


@pytest.fixture
async def openai(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_before(FakeServer(), monkeypatch, max_sessions=4) as client:
        yield client


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the SDK dumps what it parsed itself
async def test_a_parsed_answer_is_gone_on_from(openai: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What should I plant?"}]
    for question in ("And in the shade?", "And in the sun?"):
        completion = await openai.chat.completions.parse(model="fake", messages=messages, response_format=Plant)
        message = completion.choices[0].message
        assert isinstance(message.parsed, Plant)
        messages += [message, {"role": "user", "content": question}]
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens


async def test_a_parsed_call_is_gone_on_from(openai: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What should I plant?"}]
    tools: Any = [pydantic_function_tool(Plant)]
    for _ in range(2):
        completion = await openai.chat.completions.parse(
            model="fake", messages=messages, tools=tools, tool_choice="required"
        )
        message = completion.choices[0].message
        assert message.tool_calls
        [call] = message.tool_calls
        assert isinstance(call.function.parsed_arguments, Plant)
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "It is planted."}]


async def test_an_answer_with_log_probabilities_is_gone_on_from(openai: AsyncOpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "What should I plant?"}]
    for question in ("And in the shade?", "And in the sun?"):
        response = await openai.responses.create(
            model="fake", input=said, include=["message.output_text.logprobs"], max_output_tokens=6
        )
        said += [*response.output, {"role": "user", "content": question}]
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens
