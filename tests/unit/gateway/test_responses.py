"""The unmodified OpenAI SDK asks for responses of a gateway before a fake server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from microturn_client.testing import FakeServer
from support.chats import gateway_before

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
QUESTION = "What should I plant in a small garden?"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "How the weather is in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Basel"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
FORCED = {"type": "function", "name": "get_weather"}
MAX_SESSIONS = 4


@pytest.fixture
def server(request: pytest.FixtureRequest) -> FakeServer:
    return FakeServer(token_s=getattr(request, "param", 0.0))


@pytest.fixture
def idle_timeout_s() -> float:
    return 900.0


@pytest.fixture
async def openai(
    server: FakeServer, idle_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_before(server, monkeypatch, max_sessions=MAX_SESSIONS, idle_timeout_s=idle_timeout_s) as client:
        yield client


async def ask(openai: AsyncOpenAI, said: Any = QUESTION, previous: Any = None, **options: Any) -> Any:
    model = (await openai.models.list()).data[0].id
    options = {"max_output_tokens": 6, **options}
    previous_id = sdk.NOT_GIVEN if previous is None else previous.id
    return await openai.responses.create(model=model, input=said, previous_response_id=previous_id, **options)


def cached(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


def computed(response: Any) -> int:
    return int(response.usage.input_tokens) - cached(response)


async def test_a_response_says_what_was_asked(openai: AsyncOpenAI) -> None:
    response = await ask(openai, instructions="Be brief.", metadata={"a": "b"}, parallel_tool_calls=False, user="me")
    assert (response.object, response.status, response.error) == ("response", "incomplete", None)
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 6)
    assert (response.parallel_tool_calls, response.user, response.tool_choice) == (False, "me", "auto")
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert response.output_text == message.content[0].text != ""
    assert response.usage.output_tokens == 6
    assert response.usage.total_tokens == response.usage.input_tokens + 6


async def test_events_tell_the_response_as_it_comes(openai: AsyncOpenAI) -> None:
    events = [event async for event in await ask(openai, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(deltas) == last.output_text == events[-4].text
    assert len(deltas) > 1
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {last.output[0].id}
    assert events[0].response.id == last.id
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])


async def test_a_stream_names_its_events_and_says_when_it_is_done(openai: AsyncOpenAI) -> None:
    async with openai.responses.with_streaming_response.create(input=QUESTION, model="fake", stream=True) as stream:
        *events, done, rest = (await stream.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        name, data = event.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


@pytest.mark.parametrize("calls", [False, True])
async def test_events_and_responses_have_all_that_the_types_of_the_sdk_want(openai: AsyncOpenAI, calls: bool) -> None:
    """It does not check them itself."""
    options: Any = {"tools": [WEATHER], "tool_choice": FORCED, "max_output_tokens": 200} if calls else {}
    events = [event async for event in await ask(openai, stream=True, **options)]
    for event in events:
        _EVENT.validate_python(event.to_dict(), strict=True)
    Response.model_validate((await ask(openai, **options)).to_dict(), strict=True)


@pytest.mark.parametrize("server", [0.005], indirect=True)
async def test_an_answer_that_fails_says_so(server: FakeServer, openai: AsyncOpenAI) -> None:
    first = await ask(openai)

    def change() -> None:
        server.model_fingerprint = "another model"
        server.restart()

    asyncio.get_running_loop().call_later(0.3, change)
    events = [event async for event in await ask(openai, "And now?", first, stream=True, max_output_tokens=2000)]
    assert "response.output_text.delta" in [event.type for event in events]
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.message
    with pytest.raises(sdk.NotFoundError):
        await openai.responses.retrieve(events[-1].response.id)
    again = await ask(openai, "And now?", first)
    assert again.usage.input_tokens > first.usage.total_tokens
    assert cached(again) == 0


@pytest.mark.parametrize("server", [0.005], indirect=True)
async def test_requests_at_once_have_a_session_each_as_long_as_there_is_room(openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    answers = await asyncio.gather(
        *(ask(openai, "And now?", first, max_output_tokens=60) for _ in range(MAX_SESSIONS + 1)), return_exceptions=True
    )
    refused = [answer for answer in answers if isinstance(answer, sdk.RateLimitError)]
    assert [refusal.code for refusal in refused] == ["too_many_sessions"]
    lengths = {answer.usage.input_tokens for answer in answers if not isinstance(answer, BaseException)}
    assert len(lengths) == 1
    assert (await ask(openai, "And now?", first)).status == "incomplete"


@pytest.mark.parametrize("idle_timeout_s", [0.2])
async def test_unused_responses_are_given_up(openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    await asyncio.sleep(0.7)  # to look is to use it
    with pytest.raises(sdk.NotFoundError):
        await openai.responses.retrieve(first.id)


async def test_the_next_turn_computes_only_what_is_new(openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    second = await ask(openai, "And in the shade?", first)
    assert second.previous_response_id == first.id
    assert cached(second) >= first.usage.total_tokens - 2
    assert computed(second) < computed(first)


async def test_instructions_are_of_one_response(openai: AsyncOpenAI) -> None:
    first = await ask(openai, instructions="Be brief.")
    same = await ask(openai, "And now?", first, instructions="Be brief.")
    assert cached(same) >= first.usage.total_tokens - 2
    other = await ask(openai, "And now?", first)
    assert other.usage.input_tokens == same.usage.input_tokens - len("Be brief.")
    assert other.instructions is None


async def test_where_the_conversation_branches_each_branch_keeps_what_it_shares(openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    one = await ask(openai, "And in the shade?", first)
    other = await ask(openai, "And in the sun?", first)
    assert cached(other) >= first.usage.total_tokens - 2
    for latest in (one, other):
        after = await ask(openai, "Why?", latest)
        assert cached(after) >= latest.usage.total_tokens - 2


async def test_a_conversation_that_is_sent_as_a_whole_finds_its_session(openai: AsyncOpenAI) -> None:
    """So agent frameworks send it by default."""
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await ask(openai, said)
    said += [first.output[0].to_dict(), {"role": "user", "content": "And in the shade?"}]
    stranger = openai.with_options(api_key="other")
    strange: list[tuple[AsyncOpenAI, Any]] = [
        (stranger, {}),
        (openai, {"instructions": "Be brief."}),
    ]
    for asking, options in strange:
        assert cached(await ask(asking, said, **options)) == 0
    aside = await ask(openai, said, store=False)
    assert cached(aside) >= first.usage.total_tokens - 2
    second = await ask(openai, said)
    assert second.previous_response_id is None
    assert cached(second) >= first.usage.total_tokens - 2


async def test_nothing_is_kept_of_what_is_not_stored(openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    aside = await ask(openai, "Between us.", first, store=False)
    assert cached(aside) >= first.usage.total_tokens - 2
    assert aside.store is False
    with pytest.raises(sdk.NotFoundError):
        await openai.responses.retrieve(aside.id)
    with pytest.raises(sdk.NotFoundError) as unknown:
        await ask(openai, "Go on.", aside)
    assert (unknown.value.code, unknown.value.param) == ("previous_response_not_found", "previous_response_id")
    assert cached(await ask(openai, "Go on.", first)) >= first.usage.total_tokens - 2


async def test_a_stored_response_is_found_and_deleted(openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    assert (await openai.responses.retrieve(first.id)).model_dump() == first.model_dump()
    second = await ask(openai, "And in the shade?", first)
    await openai.responses.delete(second.id)
    with pytest.raises(sdk.NotFoundError):
        await openai.responses.retrieve(second.id)
    with pytest.raises(sdk.NotFoundError):
        await openai.responses.delete(second.id)
    third = await ask(openai, "And in the sun?", first)
    assert cached(third) >= first.usage.total_tokens - 2


async def test_nobody_goes_on_from_the_response_of_another(openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    stranger = openai.with_options(api_key="other")
    for attempt in (stranger.responses.retrieve(first.id), stranger.responses.delete(first.id)):
        with pytest.raises(sdk.NotFoundError) as refused:
            await attempt
        assert refused.value.code == "response_not_found"
    with pytest.raises(sdk.NotFoundError):
        await ask(stranger, "Go on.", first)


async def test_earlier_answers_are_named_by_their_items(openai: AsyncOpenAI) -> None:
    """So Vercel's AI SDK sends a conversation by default: its own part as a whole, and references to ours."""
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await ask(openai, said)
    said += [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "How warm is it?"}]
    second = await ask(openai, said, tools=[WEATHER], tool_choice=FORCED, max_output_tokens=200)
    [call] = second.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    third = await ask(openai, [*said, {"type": "item_reference", "id": call.id}, result], tools=[WEATHER])
    assert cached(third) >= second.usage.total_tokens - 2
    whole = [said[0], first.output[0].to_dict(), said[2], call.to_dict(), result]
    assert (await ask(openai, whole, tools=[WEATHER])).usage.input_tokens == third.usage.input_tokens


async def test_only_items_that_are_there_are_named(openai: AsyncOpenAI) -> None:
    first, unstored = await ask(openai), await ask(openai, store=False)
    stranger = openai.with_options(api_key="other")
    for asking, response in ((openai, unstored), (stranger, first)):
        with pytest.raises(sdk.NotFoundError) as refused:
            await ask(asking, [{"type": "item_reference", "id": response.output[0].id}])
        assert (refused.value.code, refused.value.param) == ("item_not_found", "input.0.id")
    await openai.responses.delete(first.id)
    with pytest.raises(sdk.NotFoundError):
        await ask(openai, [{"type": "item_reference", "id": first.output[0].id}])


async def test_a_conversation_is_told_again_where_its_session_is_gone(server: FakeServer, openai: AsyncOpenAI) -> None:
    first = await ask(openai)
    others = [await ask(openai, f"Question {index}") for index in range(MAX_SESSIONS)]
    told = await ask(openai, "And in the shade?", first)
    assert cached(told) == 0
    assert told.usage.input_tokens > first.usage.total_tokens
    server.restart()
    again = await ask(openai, "And in the shade?", others[-1])
    assert again.usage.input_tokens > others[-1].usage.total_tokens


async def test_a_function_is_called_and_its_result_is_all_that_is_new(openai: AsyncOpenAI) -> None:
    options = {"tools": [WEATHER], "max_output_tokens": 200}
    first = await ask(openai, "How warm is it?", tool_choice=FORCED, **options)
    [call] = first.output
    assert (first.status, call.type, call.status) == ("completed", "function_call", "completed")
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Bern", "Basel")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    second = await ask(openai, [result], first, tools=[WEATHER])
    assert cached(second) >= first.usage.total_tokens - 2
    assert second.tools[0].name == "get_weather"


async def test_a_call_streams(openai: AsyncOpenAI) -> None:
    stream = await ask(openai, tools=[WEATHER], tool_choice="required", max_output_tokens=200, stream=True)
    events = [event async for event in stream]
    [call] = events[-1].response.output
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call.arguments
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[2].item.call_id == call.call_id


async def test_an_answer_matches_a_schema(openai: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    response = await ask(openai, text=text, max_output_tokens=100)
    assert json.loads(response.output_text) == {"n": 1}
    assert response.text.format.type == "json_schema"
