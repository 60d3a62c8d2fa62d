"""The unmodified OpenAI SDK has the model call tools, and tells it their results."""

from __future__ import annotations

import json
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

from support.gateway import running_gateway
from support.tool_contract import CITIES, REPORT, STOP, WEATHER, check_report

TOOLS = [WEATHER, {"type": "function", "function": STOP}]
QUESTION: list[Any] = [{"role": "user", "content": "How warm is it in Bern?"}]
FORCED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def openai(tool_openai: AsyncOpenAI) -> AsyncOpenAI:
    return tool_openai


async def ask(openai: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    options = {"max_tokens": 100, "tools": TOOLS, **options}
    model = (await openai.models.list()).data[0].id
    return await openai.chat.completions.create(model=model, messages=messages, **options)


async def test_a_forced_call_matches_its_schema(openai: AsyncOpenAI) -> None:
    [choice] = (await ask(openai, QUESTION, tool_choice=FORCED)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in CITIES
    assert 1 <= arguments["days"] <= 9


async def test_a_call_streams(openai: AsyncOpenAI) -> None:
    [whole] = (await ask(openai, QUESTION, tool_choice=FORCED)).choices[0].message.tool_calls
    stream = await ask(openai, QUESTION, tool_choice=FORCED, stream=True)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].function.name) == (0, "get_weather")
    assert deltas[0].id
    assert len(deltas) > 2
    assert "".join(delta.function.arguments for delta in deltas) == whole.function.arguments
    assert choices[-1].finish_reason == "tool_calls"


async def test_a_result_is_all_that_is_computed_of_the_second_request(openai: AsyncOpenAI) -> None:
    first = await ask(openai, QUESTION, tool_choice=FORCED)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}
    history = [*QUESTION, message.model_dump(exclude_none=True), result]
    second = await ask(openai, history, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 2
    assert second.usage.prompt_tokens - first.usage.total_tokens < 40
    assert second.choices[0].message.content


async def test_beside_a_format_a_tool_is_called_and_its_result_answered_in_that_format(openai: AsyncOpenAI) -> None:
    """As agents with tools and an output type ask: the format was refused, or held from the first token."""
    schema = {"type": "json_schema", "json_schema": {"name": "report", "schema": REPORT, "strict": True}}
    first = (await ask(openai, QUESTION, tool_choice=FORCED, response_format=schema)).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", None)
    result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "21 degrees, clear"}
    history = [*QUESTION, first.message.model_dump(exclude_none=True), result]
    second = (await ask(openai, history, response_format=schema)).choices[0]
    if second.message.tool_calls:
        assert second.message.tool_calls[0].function.name in ("get_weather", "stop_music")
    else:
        assert second.finish_reason == "stop"
        check_report(second.message.content)


async def test_without_a_session_the_calls_are_told_again(openai: AsyncOpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "stop_music", "arguments": "{}"}}
    history = [*QUESTION, {"role": "assistant", "tool_calls": [call]}]
    results = [{"role": "tool", "tool_call_id": "a", "content": "done"}]
    answer = await ask(openai, [*history, *results], max_tokens=8)
    assert answer.usage.completion_tokens == 8


async def test_where_calls_are_not_parallel_there_is_one_and_the_talk_goes_on(openai: AsyncOpenAI) -> None:
    """This model calls until its tokens end."""
    several = await ask(openai, QUESTION, tool_choice="required")
    assert len(several.choices[0].message.tool_calls) > 1
    first = await ask(openai, QUESTION, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    [call] = message.tool_calls
    assert call.function.arguments == several.choices[0].message.tool_calls[0].function.arguments
    history = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    second = await ask(openai, history, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 2
    assert second.choices[0].message.content


async def test_no_tool_is_called_where_none_may_be(openai: AsyncOpenAI) -> None:
    answer = await ask(openai, QUESTION, tool_choice="none", max_tokens=8)
    assert answer.choices[0].message.tool_calls is None
    with pytest.raises(sdk.BadRequestError, match="must be one of the 'tools'"):
        await ask(openai, QUESTION, tool_choice={"type": "function", "function": {"name": "get_money"}})


async def test_a_model_without_a_place_for_tools_refuses_them(server: str) -> None:
    with running_gateway(server) as address:
        async with AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1", max_retries=0) as openai:
            with pytest.raises(sdk.BadRequestError, match="has no place for tools"):
                await ask(openai, QUESTION)
