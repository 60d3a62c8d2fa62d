"""What `session.update` takes: known fields, fields that are inert for text, and what is refused beside them."""

from __future__ import annotations

from typing import Any

import pytest

from support.realtime_driver import Driver, error_of, types

# As the OpenAI Agents SDK and Pipecat send them with each session, whether they speak or write.
INERT = {
    "audio": {"input": {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": None}},
    "include": ["item.input_audio_transcription.logprobs"],
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low"},
    "tool_choice": "auto",
    "tracing": "auto",
    "truncation": {"type": "retention_ratio", "retention_ratio": 0.8},
}


def update(driver: Driver, **session: Any) -> list[dict[str, Any]]:
    driver.send("session.update", session={"type": "realtime", **session})
    return driver.run()


def test_what_is_inert_for_text_is_echoed(driver: Driver) -> None:
    [updated] = update(driver, instructions="Be brief.", output_modalities=["text"], **INERT)
    assert updated["type"] == "session.updated"
    assert updated["session"].items() >= {"instructions": "Be brief.", "output_modalities": ["text"], **INERT}.items()
    [updated] = update(driver, tracing=None, tool_choice="none")
    assert updated["session"].items() >= {**INERT, "tracing": None, "tool_choice": "none"}.items()


def test_an_update_does_not_reach_back_to_what_was_sent_before_it() -> None:
    driver = Driver(instructions="Be brief.")
    driver.item("Hello")
    step = driver.begin()
    driver.send("response.create")
    driver.send(
        "session.update", session={"instructions": "Sing.", "max_output_tokens": 7, "microturn": {"temperature": 1}}
    )
    driver.answer(step)
    driver.run()
    assert driver.server.text == "<system>Be brief.<user>Hello<assistant>Hi there"
    assert driver.options == {"role": "assistant", "max_tokens": 100}
    assert not any("rewind_to" in step.options for step in driver.steps)
    driver.item("And now?")
    driver.send("response.create")
    driver.run()
    said = "<user>Hello<assistant>Hi there<user>And now?<assistant>Hi there"
    assert driver.server.text == f"<system>Sing.{said}"
    assert driver.options == {"role": "assistant", "max_tokens": 7, "temperature": 1}


@pytest.mark.parametrize("turn_detection", [None, {"type": "server_vad", "interrupt_response": True}])
def test_nobody_is_told_that_somebody_else_interrupts(driver: Driver, turn_detection: object) -> None:
    """Where turn detection interrupts, the Agents SDK's `interrupt()` cancels no answer."""
    heard = {"format": {"type": "audio/pcm", "rate": 24000}, "turn_detection": turn_detection}
    [updated] = update(driver, audio={"input": heard, "output": {"voice": "ash"}})
    assert updated["session"]["audio"] == {"input": {**heard, "turn_detection": None}, "output": {"voice": "ash"}}


@pytest.mark.parametrize("audio", [None, "loud", {"input": "loud"}, {"output": {"voice": "ash"}}])
def test_audio_of_any_shape_is_shown_as_it_came(driver: Driver, audio: object) -> None:
    [updated] = update(driver, audio=audio)
    assert updated["session"]["audio"] == audio


@pytest.mark.parametrize(
    ("bad", "code", "params"),
    [
        ({"tools": [{"type": "mcp", "name": "f"}]}, "unsupported_parameter", ["session.tools"]),
        ({"output_modalities": ["audio"]}, "unsupported_parameter", ["session.output_modalities"]),
        ({"tool_choice": "always"}, "unsupported_parameter", ["session.tool_choice"]),
        ({"type": "transcription"}, "unsupported_parameter", ["session.type"]),
        ({"prompt": {"id": "pmpt_1"}}, "unsupported_parameter", ["session.prompt"]),
        ({"microturn": {"seed": 3, "heat": 1}}, "unsupported_parameter", ["session.microturn.heat"]),
        ({"microturn": {"seed": 3, "stop": [1]}}, "invalid_type", ["session.microturn.stop"]),
        ({"tools": 5, "voice": "cedar"}, "invalid_type", ["session.tools", "session.voice"]),
    ],
)
def test_one_field_that_is_refused_takes_no_other_with_it(
    driver: Driver, bad: dict[str, Any], code: str, params: list[str]
) -> None:
    events = update(driver, **{"instructions": "Be brief.", "max_output_tokens": 7, "microturn": {"seed": 3}, **bad})
    assert types(events) == ["session.updated", "error"]
    session, error = events[0]["session"], events[1]["error"]
    assert (session["instructions"], session["max_output_tokens"]) == ("Be brief.", 7)
    assert session["microturn"]["seed"] == 3
    assert (session["output_modalities"], session["tools"], session["tool_choice"]) == (["text"], [], "none")
    assert (error["code"], error["param"], error["event_id"]) == (code, params[0], "mine")
    assert all(param in error["message"] for param in params)
    driver.item("Hello")
    driver.run()
    assert driver.server.text == "<system>Be brief.<user>Hello"


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"instructions": 5}, "session.instructions"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        ({"max_output_tokens": "all"}, "session.max_output_tokens"),
        ({"microturn": 5}, "session.microturn"),
        ({"microturn": {"temperature": "hot"}}, "session.microturn.temperature"),
    ],
)
def test_a_known_field_that_is_wrong_leaves_what_was_there(driver: Driver, bad: dict[str, Any], param: str) -> None:
    good = {"instructions": "Be brief.", "max_output_tokens": 7, "microturn": {"temperature": 0.5}}
    [before] = update(driver, **good)
    updated, error = update(driver, **bad)
    assert updated["session"] == before["session"]
    assert error["error"]["param"] == param


def test_what_is_beside_the_session_takes_nothing_with_it_either(driver: Driver) -> None:
    driver.send("session.update", session={"instructions": "Be brief.", "voice": "ash"}, priority="high")
    updated, error = driver.run()
    assert updated["session"]["instructions"] == "Be brief."
    assert "'session.voice'" in error["error"]["message"]
    assert "'priority'" in error["error"]["message"]


def test_another_model_is_refused_as_everywhere() -> None:
    driver = Driver(models=("tiny", "gpt-4o"))
    driver.taken()
    [updated] = update(driver, model="gpt-4o")
    assert updated["session"]["model"] == "gpt-4o"
    updated, error = update(driver, model="gpt-8", instructions="Be brief.")
    assert (updated["session"]["model"], updated["session"]["instructions"]) == ("gpt-4o", "Be brief.")
    assert (error["error"]["code"], error["error"]["param"]) == ("model_not_found", "session.model")
    assert "'tiny', 'gpt-4o'" in error["error"]["message"]


def test_null_takes_an_option_back(driver: Driver) -> None:
    update(driver, microturn={"temperature": 0.5, "seed": 3, "stop": ["a"], "logit_bias": {"5": 1}})
    [updated] = update(driver, microturn={"temperature": None, "stop": [], "logit_bias": None})
    assert updated["session"]["microturn"] == {"seed": 3, "beat_ms": 200.0, "max_context": None}
    driver.item("Hello")
    driver.send("response.create", response={"microturn": {"seed": None, "top_p": 0.5}})
    driver.run()
    assert driver.options == {"role": "assistant", "top_p": 0.5, "max_tokens": 100}
    assert driver.steps[-1].options["seed"] != 3


@pytest.mark.parametrize("session", [None, "fast", [1]])
def test_without_a_session_nothing_is_updated(driver: Driver, session: object) -> None:
    driver.send("session.update", session=session)
    [error] = driver.run()
    assert error["error"]["param"] == "session"


@pytest.mark.parametrize("buffer", ["input_audio_buffer", "output_audio_buffer"])
def test_audio_that_never_came_is_cleared_and_text_stays(driver: Driver, buffer: str) -> None:
    driver.send("input_text_buffer.append", text="Hello")
    driver.send(f"{buffer}.clear")
    assert types(driver.run()) == [f"{buffer}.cleared", "input_text_buffer.appended"]
    assert driver.server.text == "<user>Hello"


def test_a_response_takes_what_is_inert_for_text(driver: Driver) -> None:
    driver.item("Hello")
    inert = {"audio": {"output": {"voice": "cedar"}}, "parallel_tool_calls": False, "reasoning": {"effort": "low"}}
    driver.send(
        "response.create", response={**inert, "tools": [], "tool_choice": "auto", "output_modalities": ["text"]}
    )
    assert driver.run()[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize("field", [{"input": []}, {"instructions": "Sing."}, {"prompt": {"id": "pmpt_1"}}])
def test_a_response_that_would_be_another_one_is_refused(driver: Driver, field: dict[str, Any]) -> None:
    driver.item("Hello")
    driver.send("response.create", response=field)
    assert error_of(driver.run())["param"] == f"response.{next(iter(field))}"
    assert not driver.realtime.is_answering
    assert all(step.response is None for step in driver.steps)


def test_parts_may_say_that_they_are_to_be_cached(driver: Driver) -> None:
    part = {"type": "input_text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    driver.send("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
    driver.run()
    assert driver.server.text == "<user>Hello"
