"""Unmodified frameworks from the package index: each streams an answer, calls a tool, and has its KV kept.

Each program runs once, in an environment of its framework's, and prints what it saw.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.needed import needed

_FOLDER = Path(__file__).parent
_ROOT = _FOLDER.parents[1]
_PROGRAMS = _FOLDER / "programs"

# Each program, and the environment that it runs in.
PROGRAMS = {
    "openai_chat": "agents",
    "openai_responses": "agents",
    "openai_realtime": "agents",
    "agents_text": "agents",
    "agents_realtime": "agents",
    "langchain_chat": "agents",
    "pipecat_chat": "agents",
    "pipecat_realtime": "agents",
    "livekit_chat": "agents",
    "litellm_chat": "litellm",
    "pipecat_speech": "agents",
}
SPEECH = "pipecat_speech"
CITIES = ("Bern", "Basel", "Chur")
# Nothing is asked for on the network but the gateway.
_OFFLINE = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_PROGRAM_S = 180

# A template's tokens around a message, and the message: a question or a tool's result of a few words.
_MOST_NEW_TOKENS = 40


@dataclass(frozen=True)
class Used:
    """Tokens of one answer, as the framework counts them."""

    prompt: int
    cached: int
    answer: int


@dataclass(frozen=True)
class Seen:
    """What a program saw of its talk: a question, a call, the answer to its result, and most ask once more."""

    pieces: list[str]
    call: dict[str, Any]
    usage: list[Used]
    structured: dict[str, str] | None


@pytest.fixture(scope="module")
def seen_by(base_url: str) -> Callable[[str], Seen]:
    """Runs a program, once."""
    return cache(partial(_run, base_url))


@pytest.fixture(params=[program for program in PROGRAMS if program != SPEECH])
def seen(request: pytest.FixtureRequest, seen_by: Callable[[str], Seen]) -> Seen:
    return seen_by(request.param)


def _run(base_url: str, program: str) -> Seen:
    told = _told(base_url, program)
    return Seen(told["pieces"], told["call"], _usage(told), told.get("structured"))


def _usage(told: dict[str, Any]) -> list[Used]:
    return [Used(*used) for used in told["usage"]]


def _told(base_url: str, program: str) -> dict[str, Any]:
    """What a program prints at its end."""
    python = needed(_ROOT / ".frameworks" / PROGRAMS[program] / "bin" / "python", "make setup-frameworks")
    done = subprocess.run(
        [python, _PROGRAMS / f"{program}.py"],
        env={**os.environ, **_OFFLINE, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": program},
        capture_output=True,
        text=True,
        timeout=_PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(program, told["usage"])
    return told


def test_it_streams_an_answer(seen: Seen) -> None:
    assert len([piece for piece in seen.pieces if piece]) > 3
    assert "".join(seen.pieces).strip()


def test_it_calls_a_tool(seen: Seen) -> None:
    assert seen.call["name"] == "get_weather"
    assert seen.call["arguments"].keys() == {"city"}
    assert seen.call["arguments"]["city"] in CITIES


def test_each_turn_computes_only_what_is_new(seen: Seen) -> None:
    assert len(seen.usage) > 1
    for before, after in pairwise(seen.usage):
        assert after.cached >= before.prompt + before.answer - 2
        assert after.prompt - after.cached < _MOST_NEW_TOKENS


def test_spoken_questions_are_answered_aloud_by_one_session(base_url: str) -> None:
    needed("espeak-ng", "apt install espeak-ng")
    told = _told(base_url, SPEECH)
    assert len(told["heard"]) == 2
    assert "weather" in told["heard"][0]
    first, second = _usage(told)
    assert second.cached >= first.prompt + first.answer - 2
    assert sum(told["said_s"]) > 1.0


def test_langchains_structured_output_is_of_its_schema(seen_by: Callable[[str], Seen]) -> None:
    weather = seen_by("langchain_chat").structured
    assert weather is not None
    assert weather.keys() == {"city", "sky"}
    assert weather["city"] in CITIES
    assert weather["sky"] in ("clear", "cloudy")


def test_the_documentation_names_the_versions_that_run_here() -> None:
    page = (_ROOT / "docs" / "gateway.md").read_text()
    section = page.split("## Agent frameworks\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| [^|]+ \| ([a-z-]+) ([\d.]+) \|", section, re.MULTILINE))
    pinned = {
        (re.sub(r"\[.*?\]", "", name), version)
        for environment in set(PROGRAMS.values())
        for name, version in re.findall(r"^(\S+)==(\S+)$", (_FOLDER / f"{environment}.txt").read_text(), re.MULTILINE)
    }
    assert {name for name, _ in documented} == {
        *("openai", "openai-agents", "langchain-openai", "litellm", "pipecat-ai", "livekit-plugins-openai")
    }
    assert documented <= pinned
