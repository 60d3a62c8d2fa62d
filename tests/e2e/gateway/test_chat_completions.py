"""The unmodified OpenAI SDK asks for chat completions, and sends the whole conversation each time."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import openai as sdk
import pytest
from openai import AsyncOpenAI

from microturn_client import Client, Tokens

MODEL = "smollm2-135m"
Messages = list[dict[str, str]]


@pytest.fixture
def beginning(request: pytest.FixtureRequest) -> Messages:
    """Of a conversation that no other test has."""
    rules = "You answer in one short sentence, and you never say more than you know."
    return [
        {"role": "system", "content": f"{request.node.name}. {rules}"},
        {"role": "user", "content": "What is the capital of France?"},
    ]


async def ask(openai: AsyncOpenAI, messages: Messages, **options: Any) -> Any:
    return await openai.chat.completions.create(model=MODEL, messages=messages, **{"max_tokens": 6, **options})


def said(beginning: Messages, text: str, question: str) -> Messages:
    return [*beginning, {"role": "assistant", "content": text}, {"role": "user", "content": question}]


async def alone(server: str, messages: Messages) -> str:
    """The answer of a session that holds nothing else."""

    def answer() -> str:
        with Client(server) as client, client.session() as session:
            for message in messages:
                session.append(message["content"], role=message["role"])
            events = session.turn(role="assistant", max_tokens=6)
            return "".join(event.text for event in events if isinstance(event, Tokens))

    return await asyncio.to_thread(answer)


def text_of(completion: Any) -> str:
    return str(completion.choices[0].message.content)


def cached(completion: Any) -> int:
    return int(completion.usage.prompt_tokens_details.cached_tokens)


async def test_each_token_comes_with_its_log_probability(openai: AsyncOpenAI, beginning: Messages) -> None:
    [choice] = (await ask(openai, beginning, logprobs=True)).choices
    tokens = choice.logprobs.content
    assert len(tokens) == 6
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(token.token and -20 < token.logprob <= 0 for token in tokens)  # in English no character is cut in two


CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Egypt": "Cairo",
    "Peru": "Lima",
}


async def test_answers_of_a_long_chat_end_under_a_penalty(openai: AsyncOpenAI) -> None:
    """The mark at the end of each message counted: behind a few exchanges answers went on until `max_tokens`."""
    messages: Messages = []
    for country, city in CAPITALS.items():
        messages.append({"role": "user", "content": f"What is the capital of {country}?"})
        messages.append({"role": "assistant", "content": f"{city} is its capital."})
    messages.append({"role": "user", "content": "Which of these do you like best? Answer briefly."})
    completion = await ask(openai, messages, max_tokens=150, frequency_penalty=1.0)
    assert completion.choices[0].finish_reason == "stop"


async def test_an_answer_is_that_of_a_session(server: str, openai: AsyncOpenAI, beginning: Messages) -> None:
    completion = await ask(openai, beginning)
    [choice] = completion.choices
    assert choice.message.content == await alone(server, beginning)
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert completion.usage.completion_tokens == 6
    assert cached(completion) == 0
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 6


async def test_an_answer_streams(openai: AsyncOpenAI, beginning: Messages) -> None:
    whole = await ask(openai, beginning)
    stream = await ask(openai, beginning, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == text_of(whole)
    assert sum(bool(text) for text in texts) > 3
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 6


async def test_the_next_request_computes_only_what_is_new(
    server: str, openai: AsyncOpenAI, beginning: Messages
) -> None:
    first = await ask(openai, beginning)
    messages = said(beginning, text_of(first), "And of Spain?")
    second = await ask(openai, messages)
    # All but a token or two of the first exchange: what the template writes when the next message begins is new.
    assert cached(second) >= first.usage.total_tokens - 2
    assert second.usage.prompt_tokens > first.usage.total_tokens
    assert text_of(second) == await alone(server, messages)


async def test_what_was_not_heard_is_cut_and_the_rest_is_kept(
    server: str, openai: AsyncOpenAI, beginning: Messages
) -> None:
    first = await ask(openai, beginning, max_tokens=20, extra_body={"ignore_eos": True})
    heard = " ".join(text_of(first).split(" ")[:4])
    messages = said(beginning, heard, "Stop. And of Spain?")
    second = await ask(openai, messages)
    assert first.usage.prompt_tokens < cached(second) < first.usage.total_tokens - 5
    assert text_of(second) == await alone(server, messages)


async def test_another_conversation_keeps_what_both_begin_with(
    server: str, openai: AsyncOpenAI, beginning: Messages
) -> None:
    first = await ask(openai, beginning)
    other = [beginning[0], {"role": "user", "content": "Who wrote Faust?"}]
    second = await ask(openai, other)
    assert 10 < cached(second) < second.usage.prompt_tokens - 5
    assert text_of(second) == await alone(server, other)
    # The first one has lost nothing by that.
    third = await ask(openai, said(beginning, text_of(first), "And of Spain?"))
    assert cached(third) >= first.usage.total_tokens - 2


async def test_an_answer_that_is_asked_for_again_is_the_same(openai: AsyncOpenAI, beginning: Messages) -> None:
    first = await ask(openai, beginning)
    second = await ask(openai, beginning)
    assert text_of(second) == text_of(first)
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    assert cached(second) > first.usage.prompt_tokens - 12


async def test_an_answer_that_is_drawn_again_is_another_one(openai: AsyncOpenAI, beginning: Messages) -> None:
    drawn = [await ask(openai, beginning, temperature=1.5, max_tokens=16) for _ in range(2)]
    drawn += await asyncio.gather(*(ask(openai, beginning, temperature=1.5, max_tokens=16) for _ in range(2)))
    assert len({text_of(completion) for completion in drawn}) == 4
    same = [await ask(openai, beginning, temperature=1.5, max_tokens=16, seed=3) for _ in range(2)]
    assert text_of(same[0]) == text_of(same[1])


async def test_what_is_added_to_an_answer_that_ended_is_of_its_message(
    openai: AsyncOpenAI, unguarded: str, beginning: Messages
) -> None:
    """As another caller's session is told it, which never generated the token that ended the answer."""
    first = await ask(openai, beginning, max_tokens=60)
    assert first.choices[0].finish_reason == "stop"
    answer = {"role": "assistant", "content": text_of(first)}
    goes_on = [*beginning, answer]
    added = [*goes_on, {"role": "assistant", "content": "Is there more?"}, {"role": "user", "content": "And Italy?"}]
    for messages, options in ((goes_on, {"extra_body": {"min_tokens": 12}}), (goes_on, {}), (added, {})):
        own = await ask(openai, messages, max_tokens=20, **options)
        async with AsyncOpenAI(api_key=uuid4().hex, base_url=f"http://{unguarded}/v1", max_retries=0) as stranger:
            other = await ask(stranger, messages, max_tokens=20, **options)
        assert (own.usage.prompt_tokens, text_of(own)) == (other.usage.prompt_tokens, text_of(other))
        assert cached(own) > cached(other) == 0


async def test_who_leaves_interrupts_and_may_go_on(openai: AsyncOpenAI, beginning: Messages) -> None:
    stream = await ask(openai, beginning, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    heard = ""
    async for chunk in stream:
        heard += chunk.choices[0].delta.content or ""
        if len(heard) > 10:
            break
    await stream.close()
    async with asyncio.timeout(20):  # 1,500 tokens would take longer
        second = await ask(openai, said(beginning, heard, "Go on."))
    assert text_of(second)
    assert cached(second) > 20


async def test_who_asks_while_an_answer_runs_is_answered_beside_it(
    server: str, openai: AsyncOpenAI, beginning: Messages
) -> None:
    first = await ask(openai, beginning)
    messages = said(beginning, text_of(first), "And of Spain?")
    running = await ask(openai, messages, max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    chunks = aiter(running)
    while not (await anext(chunks)).choices[0].delta.content:
        pass
    async with asyncio.timeout(20):
        beside = await ask(openai, messages)
    assert cached(beside) >= first.usage.total_tokens - 2
    assert text_of(beside) == await alone(server, messages)
    assert (await anext(chunks)).choices
    await running.close()


async def test_what_is_refused_says_why(openai: AsyncOpenAI, beginning: Messages) -> None:
    with pytest.raises(sdk.BadRequestError) as too_long:
        await ask(openai, beginning, max_tokens=10_000_000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(sdk.BadRequestError) as wrong:
        await ask(openai, beginning, temperature=-1)
    assert wrong.value.code == "invalid_argument"
    with pytest.raises(sdk.NotFoundError) as unknown:
        await openai.chat.completions.create(model="gpt-8", messages=beginning)
    assert unknown.value.code == "model_not_found"
    assert (await ask(openai, beginning)).choices[0].message.content


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
        await ask(stranger, [])
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(sdk.AuthenticationError):
        await stranger.models.list()
