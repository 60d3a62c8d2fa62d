"""The OpenAI SDK: a realtime session of text."""

import asyncio
import json

from openai import AsyncOpenAI
from weather import FUNCTION

TOOL = {"type": "function", **FUNCTION}
usage = []


def user(text):
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


async def answer(connection, item, **options):
    await connection.conversation.item.create(item=item)
    await connection.response.create(response={"max_output_tokens": 64, **options})
    pieces = []
    async for event in connection:
        if event.type == "error":
            raise RuntimeError(event.error.message)
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        elif event.type == "response.done":
            break
    used = event.response.usage
    usage.append([used.input_tokens, used.input_token_details.cached_tokens, used.output_tokens])
    return pieces, event.response


async def main():
    async with AsyncOpenAI() as client, client.realtime.connect(model="smollm2-135m") as connection:
        await connection.session.update(
            session={"type": "realtime", "output_modalities": ["text"], "tools": [TOOL], "tool_choice": "auto"}
        )
        forced = {"type": "function", "name": "get_weather"}
        _, first = await answer(connection, user("How is the weather in Bern?"), tool_choice=forced)
        [call] = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees and clear"}
        pieces, _ = await answer(connection, result)
        await answer(connection, user("And tomorrow?"))
    called = {"name": call.name, "arguments": json.loads(call.arguments)}
    print(json.dumps({"pieces": pieces, "call": called, "usage": usage}))


asyncio.run(main())
