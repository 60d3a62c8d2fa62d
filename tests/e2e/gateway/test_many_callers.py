"""Two hundred callers without names talk through one gateway, and their talks branch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI

from microturn_client import AsyncClient, Tokens
from support.gateway_command import StartedGateway, started_gateway
from support.share import model_server

MODEL = "smollm2-135m"
NUM_CALLERS = 200
NUM_TOKENS = 3
# Enough for all who run at once, and not for all that they leave: sessions make way for branches.
MAX_SESSIONS = 220
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTIONS = ["What is red?", "And blue?", "Why is it so?", "Who says that?"]
SLOW = [SYSTEM, {"role": "user", "content": "Tell me a long story."}]
# The places are full after the first round: what comes after it replaces what was there.
MOST_GROWTH_BYTES = 8 * 2**20

Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def roomy_server(smollm2_dir: str) -> Iterator[str]:
    """The address of a server with twice as many places as the gateway."""
    with model_server(smollm2_dir, f"max_sessions={2 * MAX_SESSIONS}") as server:
        yield server.address


@pytest.fixture
def gateway(roomy_server: str) -> Iterator[StartedGateway]:
    with started_gateway(roomy_server, "--port", "0", "--max-sessions", str(MAX_SESSIONS)) as gateway:
        yield gateway


class Caller:
    """Somebody who asks, goes on from the answer, and then goes another way from there.

    Attributes:
        answers: what was answered to each conversation.
        num_cached: how many requests found a session of theirs.
    """

    def __init__(self, openai: AsyncOpenAI, number: int) -> None:
        self.answers: dict[str, tuple[Messages, str]] = {}
        self.num_cached = 0
        self._openai = openai.with_options(api_key=f"caller {number}")
        self._first, self._second = QUESTIONS[number % 4], QUESTIONS[number // 4 % 4]
        self._begun: Messages = []

    async def begin(self) -> None:
        """A question, and another one behind its answer."""
        self._begun = await self._ask([SYSTEM], self._first)
        await self._ask(self._begun, self._second)

    async def branch(self) -> None:
        """Something else behind the first answer."""
        await self._ask(self._begun, "Go on.")

    async def _ask(self, messages: Messages, question: str) -> Messages:
        messages = [*messages, {"role": "user", "content": question}]
        completion = await self._openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=NUM_TOKENS)
        text = completion.choices[0].message.content or ""
        assert self.answers.setdefault(repr(messages), (messages, text))[1] == text
        self.num_cached += completion.usage.prompt_tokens_details.cached_tokens > 0
        return [*messages, {"role": "assistant", "content": text}]


async def test_two_hundred_callers_are_answered_as_if_alone_and_none_waits_for_another(
    roomy_server: str, gateway: StartedGateway
) -> None:
    """None of 600 requests is refused, none waits for an answer that runs all the time, and memory does not grow."""
    process = psutil.Process(gateway.pid)
    async with AsyncOpenAI(api_key="slow", base_url=f"{gateway.address}/v1", max_retries=0, timeout=300) as openai:
        callers = [Caller(openai, number) for number in range(NUM_CALLERS)]
        slow = await openai.chat.completions.create(
            model=MODEL, messages=SLOW, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        running = asyncio.create_task(read(slow))
        await asyncio.gather(*(caller.begin() for caller in callers))
        first_bytes = process.memory_info().rss
        await asyncio.gather(*(caller.branch() for caller in callers))
        growth_bytes = process.memory_info().rss - first_bytes
        assert not running.done()
        running.cancel()
    assert growth_bytes < MOST_GROWTH_BYTES
    assert sum(caller.num_cached for caller in callers) == 2 * NUM_CALLERS
    answers: dict[str, tuple[Messages, str]] = {}
    for caller in callers:
        for conversation, answer in caller.answers.items():
            assert answers.setdefault(conversation, answer) == answer
    assert len(answers) == 24
    async with AsyncClient(roomy_server) as client:
        for messages, text in answers.values():
            assert await alone(client, messages) == text


async def read(stream: AsyncIterator[Any]) -> None:
    """Takes all of it."""
    async for _ in stream:
        pass


async def alone(client: AsyncClient, messages: Messages) -> str:
    """The answer of a session that holds nothing else."""
    async with client.session(timeout_s=300) as session:
        for message in messages:
            await session.append(message["content"], role=message["role"])
        turn = session.turn(role="assistant", max_tokens=NUM_TOKENS)
        return "".join([event.text async for event in turn if isinstance(event, Tokens)])
