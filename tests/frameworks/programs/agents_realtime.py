"""The OpenAI Agents SDK: a realtime session of text."""

import asyncio
import json
import os
from typing import Literal

from agents import function_tool
from agents.realtime import RealtimeAgent, RealtimeModelSendRawMessage, RealtimeRunner

calls, pieces, usage = [], [], []


@function_tool
async def get_weather(city: Literal["Bern", "Basel", "Chur"]) -> str:
    """How the weather is in a city."""
    calls.append({"name": "get_weather", "arguments": {"city": city}})
    return "21 degrees and clear"


agent = RealtimeAgent(name="Weather", instructions="Answer in one short sentence.", tools=[get_weather])
settings = {"model_name": "smollm2-135m", "output_modalities": ["text"], "tool_choice": "required"}
url = os.environ["OPENAI_BASE_URL"].replace("http", "ws", 1) + "/realtime?model=smollm2-135m"


async def answered(session):
    """Waits for an answer in words."""
    async for event in session:
        if event.type == "error":
            raise RuntimeError(event.error)
        if event.type == "tool_start":  # one call is enough
            update = {"type": "session.update", "other_data": {"session": {"type": "realtime", "tool_choice": "auto"}}}
            await session.model.send_event(RealtimeModelSendRawMessage(update))
        if event.type != "raw_model_event" or event.data.type != "raw_server_event":
            continue
        told = event.data.data
        if told["type"] == "response.output_text.delta":
            pieces.append(told["delta"])
        elif told["type"] == "response.done":
            used = told["response"]["usage"]
            usage.append([used["input_tokens"], used["input_token_details"]["cached_tokens"], used["output_tokens"]])
            if told["response"]["output"][-1]["type"] == "message":
                return


async def main():
    runner = RealtimeRunner(agent, config={"model_settings": settings})
    async with await runner.run(model_config={"url": url}) as session:
        for question in ["How is the weather in Bern?", "And tomorrow?"]:
            await session.send_message(question)
            await answered(session)
    print(json.dumps({"pieces": pieces, "call": calls[0], "usage": usage}))


asyncio.run(main())
