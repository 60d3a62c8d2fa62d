"""The OpenAI SDK: responses, each of which goes on from the one before."""

import json

from openai import OpenAI
from weather import FUNCTION

TOOL = {"type": "function", **FUNCTION, "strict": True}
client = OpenAI()
usage = []


def stream(said, previous=None, **options):
    with client.responses.stream(
        model="smollm2-135m", input=said, previous_response_id=previous, tools=[TOOL], max_output_tokens=64, **options
    ) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        response = events.get_final_response()
    used = response.usage
    usage.append([used.input_tokens, used.input_tokens_details.cached_tokens, used.output_tokens])
    return pieces, response


_, first = stream("How is the weather in Bern?", tool_choice={"type": "function", "name": "get_weather"})
[call] = first.output
result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees and clear"}
pieces, second = stream([result], first.id)
stream("And tomorrow?", second.id)
called = {"name": call.name, "arguments": json.loads(call.arguments)}
print(json.dumps({"pieces": pieces, "call": called, "usage": usage}))
