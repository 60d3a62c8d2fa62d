"""Near the end of a small context an answer whose client names no limit has the room that there is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from support.gateway import running_gateway
from support.share import model_server

MODEL = "smollm2-135m"
MAX_CONTEXT = 512
# No place to cut: of text like this the server has no tokens until an answer is asked for.
DENSE = json.dumps({f"k{number}": number * 7919 % 1000 for number in range(40)}, separators=(",", ":"))


@pytest.fixture(scope="module")
def small_gateway(smollm2_dir: str) -> Iterator[str]:
    with (
        model_server(smollm2_dir, f"max_context={MAX_CONTEXT}") as server,
        running_gateway(server.address, max_answer_tokens=300) as address,
    ):
        yield address


@pytest.fixture
async def openai(small_gateway: str) -> AsyncIterator[AsyncOpenAI]:
    base_url = f"http://{small_gateway}/v1"
    async with AsyncOpenAI(api_key="any", base_url=base_url, max_retries=0, timeout=60) as client:
        yield client


async def test_text_without_a_place_to_cut_is_answered(openai: AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": DENSE}]
    for _ in range(2):
        completion = await openai.chat.completions.create(
            model=MODEL, messages=messages, extra_body={"ignore_eos": True}
        )
        assert completion.choices[0].finish_reason == "length"
        assert completion.usage.prompt_tokens > MAX_CONTEXT - 300
        assert completion.usage.total_tokens == MAX_CONTEXT


async def test_in_a_realtime_session_too(openai: AsyncOpenAI) -> None:
    async with asyncio.timeout(60), openai.realtime.connect(model=MODEL) as connection:
        content = [{"type": "input_text", "text": DENSE}]
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
        await connection.response.create(response={"microturn": {"ignore_eos": True}})
        async for event in connection:
            if event.type == "response.done":
                break
        assert event.response.status == "incomplete"
        assert event.response.usage.total_tokens == MAX_CONTEXT
