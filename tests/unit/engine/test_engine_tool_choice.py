"""Tests of engine: turns whose answer must be a call of their session's tools."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from microturn.text.grammar_source import GrammarSource
from microturn.text.tool_formats import ToolFormat
from support.driver import IdsOnly
from support.fake_runner import FakeDriver
from support.grammars import FAKE_ENDS, fake_encode, fake_grammars, fake_text

PROMPT = fake_encode("How warm? ")
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Bern", "Basel"]}}}}
STOP = {"type": "function", "function": {"name": "stop"}}
LLAMA = ToolFormat("llama3_json", {})


class WithTools(IdsOnly):
    def __init__(self, tools: str) -> None:
        self.tools = tools

    def fork(self) -> IdsOnly:
        return WithTools(self.tools)


def driver_of(tool_format: ToolFormat | None = LLAMA) -> FakeDriver:
    grammars = fake_grammars()
    grammars.tool_format = tool_format
    return FakeDriver(max_context=256, eos_ids=frozenset(FAKE_ENDS), grammars=grammars, new_codec=WithTools)


def call_in(token_ids: list[int]) -> dict[str, Any]:
    return json.loads(fake_text(token_ids))


def test_an_answer_is_a_call_of_one_of_the_tools_or_of_the_one_that_is_named() -> None:
    driver = driver_of()
    first = driver.turn(
        1, PROMPT, start=True, tools=json.dumps([WEATHER, STOP]), max_tokens=100, tool_choice="required"
    )
    assert call_in(first.token_ids)["name"] in ("weather", "stop")
    assert first.status.finish_reason == "complete"
    for name in ("stop", "weather"):
        answer = driver.turn(1, PROMPT, max_tokens=100, tool_choice=name)
        assert call_in(answer.token_ids)["name"] == name


def test_the_choice_holds_for_its_turn_alone_and_a_branch_has_its_parents_tools() -> None:
    driver = driver_of()
    driver.turn(1, PROMPT, start=True, tools=json.dumps([STOP]), max_tokens=100, tool_choice="stop", session_key="k")
    free = driver.turn(1, PROMPT, max_tokens=20, ignore_eos=True, session_key="k")
    assert free.status.finish_reason == "length"
    branch = driver.turn(2, PROMPT, start=True, fork_of="1", max_tokens=100, tool_choice="stop", session_key="k")
    assert call_in(branch.token_ids) == {"name": "stop", "parameters": {}}


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [([], "required", "give them to START"), ([STOP], "weather", "known are: stop")],
)
def test_a_tool_that_the_session_does_not_have_is_refused(tools: list[Any], choice: str, reason: str) -> None:
    driver = driver_of()
    driver.turn(1, PROMPT, start=True, tools=json.dumps(tools))
    refused = driver.turn(1, PROMPT, max_tokens=9, tool_choice=choice)
    assert refused.error is not None
    assert refused.error.code == "INVALID_ARGUMENT"
    assert reason in str(refused.error)
    assert driver.turn(1, PROMPT, max_tokens=3, ignore_eos=True).status.usage["output_tokens"] == 3


def test_a_stranger_is_told_nothing_of_the_tools() -> None:
    driver = driver_of()
    driver.turn(1, PROMPT, start=True, tools=json.dumps([STOP]), session_key="hers")
    for options in ({"session_key": "his"}, {}, {"start": True, "fork_of": "1"}):
        number = 2 if "start" in options else 1
        refused = driver.turn(number, PROMPT, max_tokens=9, tool_choice="weather", **options)
        assert refused.error is not None
        assert refused.error.code == "PERMISSION_DENIED"
        assert "stop" not in str(refused.error)
    refused = driver.turn(7, PROMPT, max_tokens=9, tool_choice="weather")
    assert refused.error is not None
    assert refused.error.code == "NOT_FOUND"


def test_a_model_whose_calls_are_not_known_refuses_to_force_them() -> None:
    driver = driver_of(None)
    driver.turn(1, PROMPT, start=True, tools=json.dumps([STOP]))
    refused = driver.turn(1, PROMPT, max_tokens=9, tool_choice="stop", end=True)
    assert refused.error is not None
    assert "chat template does not tell how it writes calls" in str(refused.error)
    assert driver.engine._sessions.find(1) is None, "END closes all the same"


def test_the_engines_thread_builds_no_grammar_of_tools_and_a_second_turn_none_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was written anew on the engine's thread for every forced turn: all sessions waited for a session's tools."""
    written: list[tuple[str, str]] = []
    as_llguidance = ToolFormat.as_llguidance

    def noted(tool_format: ToolFormat, source: GrammarSource) -> str:
        written.append((source.text, threading.current_thread().name))
        return as_llguidance(tool_format, source)

    monkeypatch.setattr(ToolFormat, "as_llguidance", noted)
    driver = driver_of()
    tools = json.dumps([WEATHER, STOP])
    first = driver.turn(1, PROMPT, start=True, tools=tools, max_tokens=100, tool_choice="stop")
    assert call_in(first.token_ids)["name"] == "stop"
    again = driver.turn(1, PROMPT, max_tokens=100, tool_choice="stop")
    branch = driver.turn(2, PROMPT, start=True, fork_of="1", max_tokens=100, tool_choice="stop")
    assert call_in(again.token_ids) == call_in(branch.token_ids) == {"name": "stop", "parameters": {}}
    assert written == [("stop", "microturn-grammars-0")]
    driver.engine.stop()


def test_other_tools_make_another_grammar() -> None:
    driver = driver_of()
    for number, city in enumerate(["Bern", "Basel"]):
        schema = {"type": "object", "properties": {"city": {"const": city}}, "required": ["city"]}
        tools = json.dumps([{"name": "weather", "parameters": schema}])
        answer = driver.turn(number, PROMPT, start=True, tools=tools, max_tokens=100, tool_choice="weather")
        assert call_in(answer.token_ids)["parameters"] == {"city": city}


# ---- beside what else an answer must match ---------------------------------------------------------------------------

VALUE = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["degrees"],
    "additionalProperties": False,
}
FORMAT = {"json_schema": json.dumps(VALUE), "max_tokens": 100}


def answers_of(driver: FakeDriver, **options: Any) -> list[dict[str, Any]]:
    """Answers to one question, sampled, each of them whole."""
    recorders = [
        driver.turn(1, PROMPT, temperature=1.0, seed=seed, **{**FORMAT, **options}, rewind_to=0) for seed in range(20)
    ]
    assert {recorder.status.finish_reason for recorder in recorders} == {"complete"}
    return [call_in(recorder.token_ids) for recorder in recorders]


def is_value(answer: dict[str, Any]) -> bool:
    return answer.keys() == {"degrees"} and answer["degrees"] in range(41)


def is_call(answer: dict[str, Any]) -> bool:
    return answer.keys() == {"name", "parameters"} and answer["name"] in ("weather", "stop")


def test_an_answer_with_a_format_is_a_value_or_calls_whichever_the_model_likes() -> None:
    """The format held from the first token, so a model with tools could never call one."""
    driver = driver_of()
    driver.turn(1, start=True, tools=json.dumps([WEATHER, STOP]))
    for choice in ({}, {"tool_choice": "auto"}):
        answers = answers_of(driver, **choice)
        assert all(is_value(answer) or is_call(answer) for answer in answers)
        assert any(map(is_value, answers))
        assert any(map(is_call, answers))


@pytest.mark.parametrize("choice", ["required", "stop"])
def test_where_a_call_is_forced_a_format_is_without_effect(choice: str) -> None:
    driver = driver_of()
    driver.turn(1, start=True, tools=json.dumps([WEATHER, STOP]))
    for answer in answers_of(driver, tool_choice=choice):
        assert is_call(answer)
        assert choice in ("required", answer["name"])


def test_where_no_tool_may_be_called_or_there_is_none_the_format_holds_alone() -> None:
    with_tools, without = driver_of(), driver_of()
    with_tools.turn(1, start=True, tools=json.dumps([WEATHER, STOP]))
    without.turn(1, start=True)
    assert all(map(is_value, answers_of(with_tools, tool_choice="none")))
    assert all(map(is_value, answers_of(without)))


def test_without_a_format_none_leaves_the_answer_as_it_is() -> None:
    driver = driver_of()
    driver.turn(1, start=True, tools=json.dumps([STOP]))
    free = driver.turn(1, PROMPT, max_tokens=20, ignore_eos=True, tool_choice="none")
    assert free.status.finish_reason == "length"
    assert free.token_ids == driver.turn(1, PROMPT, max_tokens=20, ignore_eos=True, rewind_to=0).token_ids


@pytest.mark.parametrize("alone", [{"tool_choice": "stop"}, {"tool_choice": "none"}])
def test_a_call_or_a_value_that_was_cut_short_goes_on_as_what_it_is(alone: dict[str, str]) -> None:
    driver = driver_of()
    driver.turn(1, start=True, tools=json.dumps([WEATHER, STOP]))
    cut = driver.turn(1, PROMPT, **{**FORMAT, **alone, "max_tokens": 9})
    assert cut.status.finish_reason == "length"
    rest = driver.turn(1, **FORMAT, grammar_from=len(PROMPT))
    assert rest.status.finish_reason == "complete"
    answer = call_in([*cut.token_ids, *rest.token_ids])
    assert is_call(answer) if alone["tool_choice"] == "stop" else is_value(answer)


def test_a_model_whose_calls_are_not_known_takes_a_format_beside_tools_only_where_none_may_be_called() -> None:
    driver = driver_of(None)
    driver.turn(1, start=True, tools=json.dumps([WEATHER, STOP]))
    refused = driver.turn(1, PROMPT, **FORMAT)
    assert refused.error is not None
    assert refused.error.code == "INVALID_ARGUMENT"
    assert "chat template does not tell how it writes calls" in str(refused.error)
    assert "tool_choice='none'" in str(refused.error)
    assert all(map(is_value, answers_of(driver, tool_choice="none")))
