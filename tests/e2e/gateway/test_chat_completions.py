"""The unmodified OpenAI SDK asks for chat completions, and sends the whole conversation each time."""

from __future__ import annotations

import asyncio
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

from microturn_client import Client, Tokens

MODEL = "smollm2-135m"
BEGINNING = [
    {"role": "system", "content": "You answer in one short sentence, and you never say more than you know."},
    {"role": "user", "content": "What is the capital of France?"},
]


async def ask(openai: AsyncOpenAI, messages: list[dict[str, str]], session: str | None = None, **options: Any) -> Any:
    headers = {} if session is None else {"x-session-id": session}
    options = {"max_tokens": 6, **options}
    return await openai.chat.completions.create(model=MODEL, messages=messages, extra_headers=headers, **options)


def said(text: str, question: str) -> list[dict[str, str]]:
    return [*BEGINNING, {"role": "assistant", "content": text}, {"role": "user", "content": question}]


def directly(server: str, messages: list[dict[str, str]]) -> str:
    with Client(server) as client, client.session() as session:
        for message in messages:
            session.append(message["content"], role=message["role"])
        events = session.turn(role="assistant", max_tokens=6)
        return "".join(event.text for event in events if isinstance(event, Tokens))


async def test_an_answer_is_that_of_a_session(server: str, openai: AsyncOpenAI) -> None:
    completion = await ask(openai, BEGINNING)
    [choice] = completion.choices
    assert choice.message.content == await asyncio.to_thread(directly, server, BEGINNING)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert completion.usage.completion_tokens == 6
    assert completion.usage.prompt_tokens_details.cached_tokens == 0
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 6


async def test_an_answer_streams(openai: AsyncOpenAI) -> None:
    whole = await ask(openai, BEGINNING)
    stream = await ask(openai, BEGINNING, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert sum(bool(text) for text in texts) > 3
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 6


@pytest.mark.parametrize("by", ["header", "user"])
async def test_a_kept_session_computes_only_what_is_new(openai: AsyncOpenAI, by: str) -> None:
    options = {"session": "kept"} if by == "header" else {"user": "somebody"}
    first = await ask(openai, BEGINNING, **options)
    text = first.choices[0].message.content
    second = await ask(openai, said(text, "And of Spain?"), **options)
    # All but a token or two of the first exchange: what the template writes when the next message begins is new.
    held_len = first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= held_len - 2
    assert second.usage.prompt_tokens > held_len
    fresh = await ask(openai, said(text, "And of Spain?"))
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert fresh.usage.prompt_tokens == second.usage.prompt_tokens
    assert fresh.choices[0].message.content == second.choices[0].message.content


async def test_what_was_not_heard_is_cut_and_the_rest_is_kept(openai: AsyncOpenAI) -> None:
    first = await ask(openai, BEGINNING, "interrupted", max_tokens=20, extra_body={"ignore_eos": True})
    heard = " ".join(first.choices[0].message.content.split(" ")[:4])
    second = await ask(openai, said(heard, "Stop. And of Spain?"), "interrupted")
    kept_len = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens < kept_len < first.usage.total_tokens - 5
    fresh = await ask(openai, said(heard, "Stop. And of Spain?"))
    assert second.choices[0].message.content == fresh.choices[0].message.content


async def test_another_conversation_keeps_what_both_begin_with(openai: AsyncOpenAI) -> None:
    await ask(openai, BEGINNING, "changed")
    other = [BEGINNING[0], {"role": "user", "content": "Who wrote Faust?"}]
    second = await ask(openai, other, "changed")
    assert 10 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens - 5
    fresh = await ask(openai, other)
    assert second.choices[0].message.content == fresh.choices[0].message.content


async def test_an_answer_that_is_asked_for_again_is_the_same(openai: AsyncOpenAI) -> None:
    first = await ask(openai, BEGINNING, "again")
    second = await ask(openai, BEGINNING, "again")
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens - 12


async def test_who_leaves_interrupts_and_may_go_on(openai: AsyncOpenAI) -> None:
    stream = await ask(openai, BEGINNING, "left", max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    heard = ""
    async for chunk in stream:
        heard += chunk.choices[0].delta.content or ""
        if len(heard) > 10:
            break
    await stream.close()
    async with asyncio.timeout(20):  # 1,500 tokens would take longer
        second = await ask(openai, said(heard, "Go on."), "left")
    assert second.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 20


async def test_requests_of_one_session_wait_for_each_other(openai: AsyncOpenAI) -> None:
    answers = await asyncio.gather(*(ask(openai, BEGINNING, "crowded") for _ in range(3)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


async def test_what_is_refused_says_why(openai: AsyncOpenAI) -> None:
    with pytest.raises(sdk.BadRequestError) as too_long:
        await ask(openai, BEGINNING, "refused", max_tokens=10_000_000)
    assert too_long.value.code == "context_full"
    with pytest.raises(sdk.BadRequestError) as wrong:
        await ask(openai, BEGINNING, "refused", temperature=-1)
    assert wrong.value.code == "invalid_argument"
    with pytest.raises(sdk.NotFoundError) as unknown:
        await openai.chat.completions.create(model="gpt-8", messages=BEGINNING)
    assert unknown.value.code == "model_not_found"
    assert (await ask(openai, BEGINNING, "refused")).choices[0].message.content


async def test_the_models_are_listed(openai: AsyncOpenAI) -> None:
    assert [model.id async for model in openai.models.list()] == [MODEL]
    assert (await openai.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(sdk.NotFoundError) as unknown:
        await openai.models.retrieve("gpt-8")
    assert unknown.value.code == "model_not_found"


async def test_an_api_that_is_not_here_is_said_so(openai: AsyncOpenAI) -> None:
    with pytest.raises(sdk.NotFoundError) as unknown:
        await openai.embeddings.create(model=MODEL, input="Hello")
    assert unknown.value.code == "unknown_url"
    with pytest.raises(sdk.APIStatusError) as wrong:
        await openai.get("/chat/completions", cast_to=object)
    assert (wrong.value.status_code, wrong.value.code) == (405, "method_not_supported")


async def test_the_token_is_asked_for(openai: AsyncOpenAI) -> None:
    stranger = openai.with_options(api_key="something else")
    with pytest.raises(sdk.AuthenticationError) as refused:
        await ask(stranger, BEGINNING)
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(sdk.AuthenticationError):
        await stranger.models.list()
