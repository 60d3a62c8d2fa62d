"""The gateway before an edge: OpenAI's unmodified SDK, as before Triton's host in tests/e2e/gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from microturn_client import Client, Tokens
from support.gateway import running_gateway

QUESTION = "What is the capital of France?"
NUM_TOKENS = 12


@pytest.fixture
async def openai(addresses: dict[str, str]) -> AsyncIterator[AsyncOpenAI]:
    with running_gateway(addresses["edge"]) as gateway:
        async with AsyncOpenAI(api_key="any", base_url=f"http://{gateway}/v1", max_retries=0, timeout=60) as client:
            yield client


def answered_by(address: str) -> str:
    with Client(address) as client, client.session() as session:
        session.append(QUESTION, role="user")
        events = session.turn(role="assistant", max_tokens=NUM_TOKENS)
        return "".join(event.text for event in events if isinstance(event, Tokens))


async def test_a_chat_and_a_realtime_session_are_answered_through_an_edge(
    addresses: dict[str, str], openai: AsyncOpenAI
) -> None:
    expected = await asyncio.to_thread(answered_by, addresses["worker"])
    chat = await openai.chat.completions.create(
        model="smollm2-135m", messages=[{"role": "user", "content": QUESTION}], max_tokens=NUM_TOKENS
    )
    assert chat.choices[0].message.content == expected
    deltas = []
    async with asyncio.timeout(60), openai.realtime.connect(model="smollm2-135m") as connection:
        await connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
        )
        await connection.response.create(response={"max_output_tokens": NUM_TOKENS})
        async for event in connection:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
            if event.type == "response.done":
                break
    assert "".join(deltas) == expected
