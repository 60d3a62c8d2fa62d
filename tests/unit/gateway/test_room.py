"""How long an answer may be whose client does not say: as long as there is room, which the server knows alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai as sdk
import pytest
from openai import AsyncOpenAI

from microturn_client.testing import FakeServer
from support.chats import ask, gateway_before, named, question

# The server holds it, and has no token of it, until an answer is asked for: it has no place to cut.
DENSE = "x" * 180


@pytest.fixture
async def openai(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_before(FakeServer(max_context=256), monkeypatch, max_answer_tokens=100) as client:
        yield client


async def test_text_without_a_place_to_cut_leaves_its_room_to_the_answer(openai: AsyncOpenAI) -> None:
    for _ in range(2):
        completion = await ask(openai, question(DENSE), max_tokens=None)
        assert completion.choices[0].finish_reason == "length"
        assert completion.usage.total_tokens == 256
    asked = {"input": DENSE, "instructions": question("")[0]["content"], "temperature": 1.0}
    response = await openai.responses.create(model=await named(openai), **asked)
    assert response.usage.total_tokens == 256


async def test_the_gateways_own_limit_holds_where_there_is_room(openai: AsyncOpenAI) -> None:
    completion = await ask(openai, question("What grows here?"), max_tokens=None)
    assert completion.usage.completion_tokens == 100


async def test_the_limit_of_a_client_is_kept_to(openai: AsyncOpenAI) -> None:
    with pytest.raises(sdk.BadRequestError) as refused:
        await ask(openai, question(DENSE), max_tokens=100)
    assert refused.value.code == "context_length_exceeded"
    completion = await ask(openai, question(DENSE), max_tokens=10)
    assert completion.usage.completion_tokens == 10


async def test_where_there_is_no_room_an_answer_is_refused(openai: AsyncOpenAI) -> None:
    with pytest.raises(sdk.BadRequestError) as refused:
        await ask(openai, question("x" * 256), max_tokens=None)
    assert refused.value.code == "context_length_exceeded"
    # LiteLLM and CrewAI go by these words.
    assert "maximum context length is" in refused.value.message
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.responses.create(model=await named(openai), input="x" * 256)
    assert refused.value.code == "context_length_exceeded"
