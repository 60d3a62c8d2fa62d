"""The OpenAI SDK: chat completions."""

import json

from openai import OpenAI
from weather import FUNCTION

TOOL = {"type": "function", "function": FUNCTION}
client = OpenAI()
messages = [{"role": "user", "content": "How is the weather in Bern?"}]
usage = []


def stream(**options):
    with client.chat.completions.stream(
        model="smollm2-135m",
        messages=messages,
        tools=[TOOL],
        max_completion_tokens=64,
        stream_options={"include_usage": True},
        **options,
    ) as events:
        pieces = [event.delta for event in events if event.type == "content.delta"]
        completion = events.get_final_completion()
    used = completion.usage
    usage.append([used.prompt_tokens, used.prompt_tokens_details.cached_tokens, used.completion_tokens])
    messages.append(completion.choices[0].message.to_dict())
    return pieces, completion.choices[0].message


_, message = stream(tool_choice={"type": "function", "function": {"name": "get_weather"}})
[call] = message.tool_calls
messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees and clear"})
pieces, _ = stream()
messages.append({"role": "user", "content": "And tomorrow?"})
stream()
called = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
print(json.dumps({"pieces": pieces, "call": called, "usage": usage}))
