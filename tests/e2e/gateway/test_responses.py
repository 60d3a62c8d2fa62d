"""The unmodified OpenAI SDK asks the real server for responses, each going on from the one before."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import uuid4

import openai as sdk
import pytest
from openai import AsyncOpenAI

from support.tool_contract import CITIES, WEATHER

INSTRUCTIONS = "You answer in one short sentence, and you never say more than you know."
QUESTION = "What is the capital of France?"
# A branch shares whole pages of KV, and computes what of its last page the conversation before it has.
PAGE_TOKENS = 16
TOOL: dict[str, Any] = {"type": "function", "strict": True, **WEATHER["function"]}


@pytest.fixture
def openai(tool_openai: AsyncOpenAI) -> AsyncOpenAI:
    return tool_openai


async def ask(openai: AsyncOpenAI, said: Any, previous: Any = None, **options: Any) -> Any:
    options = {"max_output_tokens": 8, "instructions": INSTRUCTIONS, **options}
    if previous is not None:
        options["previous_response_id"] = previous.id
    model = (await openai.models.list()).data[0].id
    return await openai.responses.create(model=model, input=said, **options)


async def ask_afresh(openai: AsyncOpenAI, said: Any, **options: Any) -> Any:
    """As a caller of its own, who has no sessions here."""
    return await ask(openai.with_options(api_key=uuid4().hex), said, store=False, **options)


def cached(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def as_input(response: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in response.output]


async def test_an_answer_streams(openai: AsyncOpenAI) -> None:
    whole = await ask(openai, QUESTION)
    events = [event async for event in await ask(openai, QUESTION, stream=True)]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 3
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


async def test_the_second_turn_computes_only_what_is_new(openai: AsyncOpenAI) -> None:
    first = await ask(openai, QUESTION)
    second = await ask(openai, "And of Spain?", first)
    assert cached(second) >= first.usage.total_tokens - 2
    assert second.usage.input_tokens - first.usage.total_tokens < 20
    fresh = await ask_afresh(openai, [user(QUESTION), *as_input(first), user("And of Spain?")])
    assert cached(fresh) == 0
    assert fresh.usage.input_tokens == second.usage.input_tokens
    assert fresh.output_text == second.output_text


async def test_what_is_added_to_an_answer_that_ended_is_of_its_message(openai: AsyncOpenAI) -> None:
    """As a session is told it that never generated the token that ended the answer."""
    first = await ask(openai, QUESTION, max_output_tokens=60)
    assert first.status == "completed"
    more = [{"role": "assistant", "content": "Is there more?"}, user("And of Italy?")]
    for said in (more, more[:1]):
        own = await ask(openai, said, first, max_output_tokens=20)
        fresh = await ask_afresh(openai, [user(QUESTION), *as_input(first), *said], max_output_tokens=20)
        assert (own.usage.input_tokens, own.output_text) == (fresh.usage.input_tokens, fresh.output_text)
        assert cached(own) > cached(fresh) == 0


async def test_branches_of_a_response_answer_as_conversations_of_their_own(openai: AsyncOpenAI) -> None:
    first = await ask(openai, QUESTION)
    questions = ("And of Spain?", "Name a river there.", "Who lives in it?")
    branches = [await ask(openai, question, first) for question in questions]
    for question, branch in zip(questions, branches, strict=True):
        assert cached(branch) >= first.usage.total_tokens - 2 - PAGE_TOKENS
        fresh = await ask_afresh(openai, [user(QUESTION), *as_input(first), user(question)])
        assert branch.output_text == fresh.output_text
    after = await ask(openai, "Why?", branches[0])
    assert cached(after) >= branches[0].usage.total_tokens - 2
    told = [user(QUESTION), *as_input(first), user(questions[0]), *as_input(branches[0]), user("Why?")]
    assert after.output_text == (await ask_afresh(openai, told)).output_text


async def test_a_conversation_that_is_sent_as_a_whole_finds_its_session(openai: AsyncOpenAI) -> None:
    """So agent frameworks send it by default."""
    first = await ask(openai, [user(QUESTION)])
    second = await ask(openai, [user(QUESTION), *as_input(first), user("And of Spain?")])
    assert second.previous_response_id is None
    assert cached(second) >= first.usage.total_tokens - 2


async def test_what_is_not_stored_is_computed_each_time_and_answered_as_what_is(openai: AsyncOpenAI) -> None:
    caller, roles = openai.with_options(api_key=uuid4().hex), ("user", "assistant")
    said = [{"role": roles[number % 2], "content": f"Repeat the number {number}."} for number in range(21)]
    for num_messages in (1, 7, 21):  # the last are more than are appended at once
        unstored = [await ask(caller, said[:num_messages], store=False) for _ in range(2)]
        stored = await ask(openai.with_options(api_key=uuid4().hex), said[:num_messages])
        assert [cached(response) for response in unstored] == [0, 0]
        assert {response.output_text for response in unstored} == {stored.output_text}
        assert {response.usage.input_tokens for response in unstored} == {stored.usage.input_tokens}


async def test_branches_that_are_asked_for_at_once(openai: AsyncOpenAI) -> None:
    first = await ask(openai, QUESTION)
    questions = ("And of Spain?", "Name a river there.", "Who lives in it?")
    together = await asyncio.gather(*(ask(openai, question, first) for question in questions))
    alone = [await ask(openai, question, first) for question in questions]
    assert [one.usage.input_tokens for one in together] == [one.usage.input_tokens for one in alone]
    assert all(one.output_text for one in together)


async def test_a_tool_is_called_and_its_result_told(openai: AsyncOpenAI) -> None:
    options = {"tools": [TOOL], "max_output_tokens": 100}
    forced = {"type": "function", "name": "get_weather"}
    events = [event async for event in await ask(openai, QUESTION, tool_choice=forced, stream=True, **options)]
    first = events[-1].response
    [call] = first.output
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert (first.status, call.name, "".join(deltas)) == ("completed", "get_weather", call.arguments)
    assert json.loads(call.arguments)["city"] in CITIES
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = await ask(openai, [result], first, tools=[TOOL])
    assert cached(second) >= first.usage.total_tokens - 2
    assert second.usage.input_tokens - first.usage.total_tokens < 40
    assert second.output_text
    fresh = await ask_afresh(openai, [user(QUESTION), *as_input(first), result], tools=[TOOL])
    assert fresh.usage.output_tokens == second.usage.output_tokens


async def test_an_answer_matches_a_schema(openai: AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": CITIES}},
        "required": ["city"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}
    response = await ask(openai, QUESTION, text=text, max_output_tokens=40)
    assert json.loads(response.output_text)["city"] in CITIES
    assert response.status == "completed"


async def test_who_leaves_interrupts_and_may_go_on(openai: AsyncOpenAI) -> None:
    stream = await ask(openai, QUESTION, max_output_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    heard, begun = "", None
    async for event in stream:
        begun = begun or event.response
        heard += event.delta if event.type == "response.output_text.delta" else ""
        if len(heard) > 10:
            break
    await stream.close()
    async with asyncio.timeout(20):  # 1,500 tokens would take longer
        while True:
            try:
                left = await openai.responses.retrieve(begun.id)
                break
            except sdk.NotFoundError:
                await asyncio.sleep(0.1)
    assert left.output_text.startswith(heard)
    assert (left.status, left.incomplete_details.reason) == ("incomplete", "interrupted")
    assert cached(await ask(openai, "Go on.", left)) > 20


async def test_what_is_refused_says_why(openai: AsyncOpenAI) -> None:
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,", "detail": "auto"}]}]
    for said, options, param in (
        (image, {}, "input.0.content.0.type"),
        (QUESTION, {"tools": [{"type": "web_search"}]}, "tools.0.type"),
        (QUESTION, {"background": True}, "background"),
        (QUESTION, {"conversation": "conv_1"}, "conversation"),
    ):
        with pytest.raises(sdk.BadRequestError) as refused:
            await ask(openai, said, **options)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
    with pytest.raises(sdk.BadRequestError) as too_long:
        await ask(openai, QUESTION, max_output_tokens=10_000_000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(sdk.NotFoundError) as unknown:
        await ask(openai, QUESTION, previous_response_id="resp_of_nobody")
    assert unknown.value.code == "previous_response_not_found"
