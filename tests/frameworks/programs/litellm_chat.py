"""LiteLLM: chat completions of an endpoint that is compatible with OpenAI's."""

import json

import litellm
from weather import FUNCTION

TOOL = {"type": "function", "function": FUNCTION}
messages = [{"role": "user", "content": "How is the weather in Bern?"}]
usage = []


def stream(**options):
    chunks = list(
        litellm.completion(
            model="openai/smollm2-135m",
            messages=messages,
            tools=[TOOL],
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    )
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    used = whole.usage
    usage.append([used.prompt_tokens, used.prompt_tokens_details.cached_tokens, used.completion_tokens])
    messages.append(whole.choices[0].message.model_dump())
    return [text for chunk in chunks if (text := chunk.choices[0].delta.content)], whole.choices[0].message


_, message = stream(tool_choice={"type": "function", "function": {"name": "get_weather"}})
[call] = message.tool_calls
messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees and clear"})
pieces, _ = stream()
messages.append({"role": "user", "content": "And tomorrow?"})
stream()
called = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
print(json.dumps({"pieces": pieces, "call": called, "usage": usage}))
