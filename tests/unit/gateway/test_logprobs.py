"""Log probabilities of chat completions and responses, as the OpenAI SDK reads them from a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from microturn_client import Tokens
from microturn_client.testing import FakeServer
from microturn_gateway.logprobs import TokenLogprobs
from support.chats import gateway_before

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGES: Any = [{"role": "user", "content": "What should I plant?"}]
INCLUDE: Any = ["message.output_text.logprobs"]


@pytest.fixture
async def openai(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_before(FakeServer(), monkeypatch) as client:
        yield client


def told(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def test_a_token_is_told_with_the_text_that_it_makes_certain() -> None:
    logprobs = TokenLogprobs()
    assert logprobs.take(Tokens("Über", (1,), 1, (-0.5,))) == [told("Über", -0.5)]
    assert logprobs.take(Tokens("", (2,), 2, (-1.0,))) == []
    assert logprobs.take(Tokens("€", (3,), 3, (-2.0,))) == [told("", -1.0), told("€", -2.0)]
    assert logprobs.take(Tokens(" ab", (4, 5), 4, (-3.0, -4.0))) == [told("", -3.0), told(" ab", -4.0)]
    assert logprobs.take(Tokens("", (6,), 6, (-5.0,))) == []
    logprobs.drop()
    assert logprobs.take(Tokens("c", (7,), 7, (-6.0,))) == [told("c", -6.0)]
    assert logprobs.take(Tokens("d", (8,), 8)) == []


async def test_of_a_completion(openai: AsyncOpenAI) -> None:
    asked: Any = {"model": "fake", "messages": MESSAGES, "max_tokens": 8}
    [choice] = (await openai.chat.completions.create(**asked, logprobs=True)).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    tokens = choice.logprobs.content
    assert len(tokens) == 8
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(token.logprob <= 0 and bytes(token.bytes or ()) == token.token.encode() for token in tokens)
    stream = await openai.chat.completions.create(**asked, logprobs=True, stream=True)
    streamed = [chunk.choices[0] async for chunk in stream]
    assert [token for choice in streamed if choice.logprobs for token in choice.logprobs.content or ()] == tokens
    for choice_of_text in streamed[1:-1]:
        assert choice_of_text.logprobs is not None
        content = choice_of_text.logprobs.content or []
        assert "".join(token.token for token in content) == choice_of_text.delta.content
    [choice] = (await openai.chat.completions.create(**asked)).choices
    assert choice.logprobs is None


async def test_of_a_response(openai: AsyncOpenAI) -> None:
    asked: Any = {"model": "fake", "input": MESSAGES, "max_output_tokens": 8}
    response = await openai.responses.create(**asked, include=INCLUDE)
    Response.model_validate(response.to_dict(), strict=True)
    content: Any = response.output[0]
    [part] = content.content
    assert len(part.logprobs) == 8
    assert "".join(token.token for token in part.logprobs) == part.text
    assert all(token.logprob <= 0 and bytes(token.bytes) == token.token.encode() for token in part.logprobs)
    events: list[Any] = [event async for event in await openai.responses.create(**asked, include=INCLUDE, stream=True)]
    for event in events:
        _EVENT.validate_python(event.to_dict(), strict=True)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [token.logprob for delta in deltas for token in delta.logprobs] == [token.logprob for token in part.logprobs]
    assert all("".join(token.token for token in delta.logprobs) == delta.delta for delta in deltas)
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert len(done.logprobs) == 8
    without: Any = (await openai.responses.create(**asked)).output[0]
    assert without.content[0].logprobs == []


async def test_those_of_other_tokens_are_refused_by_name(openai: AsyncOpenAI) -> None:
    """Their text is not known."""
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.chat.completions.create(model="fake", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "top_logprobs")
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.responses.create(model="fake", input="a", include=INCLUDE, top_logprobs=2)
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "top_logprobs")
