"""LiveKit Agents: a session of text with the OpenAI plugin."""

import asyncio
import json
from typing import Literal

from livekit.agents import Agent, AgentSession, APIConnectOptions, function_tool
from livekit.agents.voice.agent_session import SessionConnectOptions
from livekit.plugins import openai

calls, pieces, usage = [], [], []


class Weather(Agent):
    def __init__(self):
        super().__init__(instructions="Answer in one short sentence.")

    @function_tool
    async def get_weather(self, city: Literal["Bern", "Basel", "Chur"]) -> str:
        """How the weather is in a city."""
        calls.append({"name": "get_weather", "arguments": {"city": city}})
        return "21 degrees and clear"

    async def llm_node(self, chat_ctx, tools, model_settings):
        async for chunk in Agent.default.llm_node(self, chat_ctx, tools, model_settings):
            if chunk.delta and chunk.delta.content:
                pieces.append(chunk.delta.content)
            if used := chunk.usage:
                usage.append([used.prompt_tokens, used.prompt_cached_tokens, used.completion_tokens])
            yield chunk


async def main():
    llm = openai.LLM(model="smollm2-135m", max_completion_tokens=64)
    patient = SessionConnectOptions(llm_conn_options=APIConnectOptions(timeout=60.0))  # the machine may be busy
    async with AgentSession(llm=llm, conn_options=patient) as session:
        await session.start(Weather())
        forced = {"type": "function", "function": {"name": "get_weather"}}
        await session.generate_reply(user_input="How is the weather in Bern?", tool_choice=forced)
        await session.run(user_input="And tomorrow?")
    print(json.dumps({"pieces": pieces, "call": calls[0], "usage": usage}))


asyncio.run(main())
