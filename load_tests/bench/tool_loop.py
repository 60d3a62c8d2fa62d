"""A loop of tools through the gateway: a model calls a function, is told the result, and so on, twenty times.

The OpenAI SDK asks, by chat completions (which send the whole conversation each time) and by responses (with
`previous_response_id` only what is new); each call is forced, so that all ways do the same work. Each loop is run:

* `kept`: as one caller, who finds the KV of what was said.
* `not kept`: by the same gateway, as another caller for each request, who has no sessions there; whole conversations
  are sent, and responses are not stored.

Kept loops and others alternate, before a server with default settings.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from openai import OpenAI
from tqdm import tqdm

from load_tests.bench.results import print_table, write_result
from load_tests.bench.tool_model import write_tool_model
from microturn.serve.child import running_server
from microturn.zoo.store import resolve_model

NUM_STEPS = 20
_CITIES = ["Bern", "Basel", "Geneva", "Lugano"]
_RESULT = (
    "Station {step}: 21 degrees and a light wind from the west, gusts of up to 34 km/h on the ridges; clouds come over "
    "the Jura in the afternoon, with showers from about 17:00 and some thunder; the lake is at 19 degrees, the air is "
    "good, pollen of grasses is high. Tomorrow is drier and two degrees cooler."
)
_RULES = (
    "You plan walks for guests of a hotel. Before you say anything of a walk you look up the weather of each place on "
    "the way, one after the other, and you never guess what a station would say. Walk {number}."
)

_Loop = list[float]


def run_tool_loop(model: str, num_runs: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model, for which a template with tools is put in place.
        num_runs: of each way.
    """
    seconds: dict[str, list[_Loop]] = defaultdict(list)
    cached: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        model_dir = str(write_tool_model(resolve_model(model), Path(directory)))
        with running_server(model_dir) as server, _gateway(server) as url:
            for number in tqdm(range(num_runs), unit="run"):
                for api, loop in (("chat completions", _chat_loop), ("responses", _response_loop)):
                    for keeps in (True, False):
                        way = f"{api}, {'kept' if keeps else 'not kept'}"
                        steps, cached[way] = loop(url, f"{number} {way}", keeps=keeps)
                        seconds[way].append(steps)
    # Each step's median over the runs, so that a neighbour's burst is not in the sum.
    totals = {way: sum(median(step) for step in zip(*loops, strict=True)) for way, loops in seconds.items()}
    rows: list[Sequence[object]] = [
        [
            way,
            total / totals[way.replace(", kept", ", not kept")],
            total,
            median(map(median, seconds[way])),
            cached[way],
        ]
        for way, total in totals.items()
    ]
    print(f"\n{NUM_STEPS} steps, medians of {num_runs} runs")
    print_table(["", "times as long as not kept", "loop, s", "step, s", "cached tokens at the end"], rows)
    result = {"protocol": __doc__, "model": model, "loop_s": totals, "cached_tokens": cached, "step_s": seconds}
    print("written:", write_result("tool-loop", result))


@contextmanager
def _gateway(server: str) -> Iterator[str]:
    """The URL of a gateway's API, in a process of its own."""
    command = [sys.executable, "-m", "microturn_gateway", "--server", server, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"{process.stdout.readline().split()[2]}/v1"  # "ready at URL for …"
        finally:
            process.terminate()


def _client(url: str, caller: str) -> OpenAI:
    return OpenAI(base_url=url, api_key=caller, max_retries=0, timeout=120)


def _function() -> dict[str, Any]:
    place = {"type": "string", "enum": _CITIES}
    parameters = {"type": "object", "properties": {"city": place}, "required": ["city"], "additionalProperties": False}
    return {"name": "get_weather", "description": "How the weather is in a city", "parameters": parameters}


def _chat_loop(url: str, number: str, *, keeps: bool) -> tuple[_Loop, int]:
    """Seconds of each step, and tokens that were there already in the last."""
    steps: _Loop = []
    messages: list[Any] = [{"role": "system", "content": _RULES.format(number=number)}]
    messages.append({"role": "user", "content": "How is the weather on our way?"})
    tools: list[Any] = [{"type": "function", "function": _function()}]
    for step in range(NUM_STEPS):
        with _client(url, number if keeps else f"{number} {step}") as client:
            model = client.models.list().data[0].id
            started_s = time.perf_counter()
            answer = client.chat.completions.create(
                model=model,
                messages=messages,
                tools=tools,
                tool_choice={"type": "function", "function": {"name": "get_weather"}},
                max_tokens=100,
            )
            steps.append(time.perf_counter() - started_s)
        message = answer.choices[0].message
        [call] = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": _RESULT.format(step=step)}
        messages += [message.model_dump(exclude_none=True), result]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return steps, answer.usage.prompt_tokens_details.cached_tokens or 0


def _response_loop(url: str, number: str, *, keeps: bool) -> tuple[_Loop, int]:
    """As `_chat_loop`."""
    steps: _Loop = []
    news: list[Any] = [{"role": "user", "content": "How is the weather on our way?"}]
    tools: list[Any] = [{"type": "function", "strict": True, **_function()}]
    previous: str | None = None
    for step in range(NUM_STEPS):
        with _client(url, number if keeps else f"{number} {step}") as client:
            model = client.models.list().data[0].id
            started_s = time.perf_counter()
            response = client.responses.create(
                model=model,
                instructions=_RULES.format(number=number),
                input=news,
                previous_response_id=previous,
                store=keeps,
                tools=tools,
                tool_choice={"type": "function", "name": "get_weather"},
                max_output_tokens=100,
            )
            steps.append(time.perf_counter() - started_s)
        [call] = [item.to_dict() for item in response.output]
        told = {"type": "function_call_output", "call_id": call["call_id"], "output": _RESULT.format(step=step)}
        if keeps:
            previous, news = response.id, [told]
        else:
            news += [call, told]
    assert response.usage is not None
    return steps, response.usage.input_tokens_details.cached_tokens
