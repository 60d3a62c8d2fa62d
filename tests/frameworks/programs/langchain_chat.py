"""LangChain: a chat model with tools, and one with structured output."""

import json
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def get_weather(city: Literal["Bern", "Basel", "Chur"]) -> str:
    """How the weather is in a city."""
    return f"21 degrees and clear in {city}"


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Bern", "Basel", "Chur"]
    sky: Literal["clear", "cloudy"]


model = ChatOpenAI(model="smollm2-135m", max_completion_tokens=64, stream_usage=True)
messages = [HumanMessage("How is the weather in Bern?")]
usage = []


def stream(bound):
    chunks = list(bound.stream(messages))
    message = sum(chunks[1:], chunks[0])
    used = message.usage_metadata
    usage.append([used["input_tokens"], used["input_token_details"]["cache_read"], used["output_tokens"]])
    messages.append(message)
    return [chunk.text for chunk in chunks if chunk.text], message


_, message = stream(model.bind_tools([get_weather], tool_choice="get_weather"))
[call] = message.tool_calls
messages.append(get_weather.invoke(call))
pieces, _ = stream(model.bind_tools([get_weather]))
messages.append(HumanMessage("And tomorrow?"))
stream(model.bind_tools([get_weather]))
weather = model.with_structured_output(Weather).invoke("It is clear in Chur.")
called = {"name": call["name"], "arguments": call["args"]}
print(json.dumps({"pieces": pieces, "call": called, "usage": usage, "structured": weather.model_dump()}))
