"""The OpenAI Agents SDK: an agent with a tool, whose session keeps the conversation."""

import asyncio
import json
from typing import Literal

from agents import Agent, ModelSettings, Runner, SQLiteSession, function_tool
from openai.types.responses import ResponseTextDeltaEvent

calls = []


@function_tool
def get_weather(city: Literal["Bern", "Basel", "Chur"]) -> str:
    """How the weather is in a city."""
    calls.append({"name": "get_weather", "arguments": {"city": city}})
    return "21 degrees and clear"


agent = Agent(
    name="Weather",
    instructions="Answer in one short sentence.",
    model="smollm2-135m",
    tools=[get_weather],
    model_settings=ModelSettings(tool_choice="get_weather"),
)


async def main():
    session = SQLiteSession("a talk about the weather")
    pieces, usage = [], []
    for question in ["How is the weather in Bern?", "And in Chur?"]:
        result = Runner.run_streamed(agent, question, session=session)
        pieces += [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent)
        ]
        for response in result.raw_responses:
            used = response.usage
            usage.append([used.input_tokens, used.input_tokens_details.cached_tokens, used.output_tokens])
    print(json.dumps({"pieces": pieces, "call": calls[0], "usage": usage}))


asyncio.run(main())
