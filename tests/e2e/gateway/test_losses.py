"""What clients notice when the way to the server breaks, or their session has to make way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from support.cuttable import cuttable_way
from support.gateway import running_gateway
from support.realtime_socket import closed_with, connected, received

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
FAUST = [{"role": "user", "content": "Who wrote Faust?"}]


@asynccontextmanager
async def speaking_to(address: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(api_key="none", base_url=f"http://{address}/v1", max_retries=0, timeout=60) as client:
        yield client


async def ask(client: AsyncOpenAI, messages: Any = FRANCE) -> ChatCompletion:
    completion: ChatCompletion = await client.chat.completions.create(
        model="smollm2-135m", messages=messages, max_tokens=6
    )
    return completion


def cached(completion: ChatCompletion) -> int:
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens is not None
    return completion.usage.prompt_tokens_details.cached_tokens


async def test_a_chat_goes_on_over_a_broken_way(server: str) -> None:
    with cuttable_way(server) as way, running_gateway(way.address) as address:
        async with speaking_to(address) as client:
            first = await ask(client)
            way.cut()
            second = await ask(client)
        assert second.choices[0].message.content == first.choices[0].message.content


async def test_a_realtime_session_that_is_lost_says_so_and_ends(server: str) -> None:
    with cuttable_way(server) as way, running_gateway(way.address) as address:
        async with connected(address) as socket:
            assert (await received(socket))["type"] == "session.created"
            way.cut(for_good=True)
            await socket.send('{"type": "input_text_buffer.append", "text": "Hello", "event_id": "mine"}')
            refused, lost = (await received(socket))["error"], (await received(socket))["error"]
            assert (refused["code"], refused["event_id"], lost["code"]) == ("unavailable", "mine", "session_lost")
            assert await closed_with(socket) == (1011, "session_lost")


async def test_the_session_unused_for_longest_makes_way(server: str) -> None:
    with running_gateway(server, max_sessions=1) as address:
        async with speaking_to(address) as client:
            await ask(client)
            assert cached(await ask(client)) > 10
            await ask(client, FAUST)
            assert cached(await ask(client)) == 0
            running = await client.chat.completions.create(
                model="smollm2-135m",
                messages=FRANCE,
                max_tokens=1500,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            with pytest.raises(sdk.RateLimitError) as refused:
                await ask(client, FAUST)
            assert refused.value.code == "too_many_sessions"
            await running.close()


async def test_a_session_that_nobody_uses_ends(server: str) -> None:
    with running_gateway(server, idle_timeout_s=0.2) as address:
        async with speaking_to(address) as client:
            await ask(client)
            async with asyncio.timeout(60):
                while True:
                    await asyncio.sleep(1)
                    if cached(await ask(client)) == 0:
                        break
