"""Tests of what the engine counts and logs, through an engine that is stepped by hand."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from microturn.sessions.inputs import TextInput
from microturn.telemetry.metrics import Metrics
from support.fake_runner import FakeDriver
from support.grammars import FAKE_ENDS, fake_grammars

SECRET = "swordfish"


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def metrics(driver: FakeDriver) -> Metrics:
    return driver.engine.recorder.metrics


def test_a_turn_is_counted_with_its_time_and_its_tokens(driver: FakeDriver) -> None:
    answer, _ = driver.post(1, [5, 6, 7], start=True, max_tokens=4)
    driver.clock.now_s += 0.05
    driver.engine.step()
    driver.clock.now_s += 0.03
    driver.run()
    counted = metrics(driver)
    assert answer.status.finish_reason == "length"
    assert counted.turns.values[("length",)] == counted.turns.total() == 1
    assert counted.turn_tokens.values == {
        ("input",): 3,
        ("output",): 4,
        ("computed",): 6,
        ("cached",): 0,
        ("drafted",): 0,
        ("accepted",): 0,
    }
    assert counted.turn_seconds.samples()["microturn_turn_seconds_sum", ()] == pytest.approx(0.08)
    phases = counted.turn_phase_seconds.samples()
    sums = {phase: phases["microturn_turn_phase_seconds_sum", (("phase", phase),)] for phase in ("queue", "decode")}
    assert sums == {"queue": pytest.approx(0.05), "decode": pytest.approx(0.03)}
    assert counted.turn_phase_seconds.count("restore") == 0
    assert counted.first_token_seconds.count() == 1
    between = counted.output_token_seconds
    assert between.samples()["microturn_turn_output_token_seconds_sum", ()] == pytest.approx(0.01)
    assert between.count() == 1
    assert counted.step_seconds.count() == counted.step_rows.count() == 4
    assert counted.step_tokens.samples()["microturn_step_tokens_sum", ()] == 6


def test_turns_that_ask_for_nothing_are_not_timed(driver: FakeDriver) -> None:
    driver.turn(1, start=True)
    driver.turn(1, end=True)
    counted = metrics(driver)
    assert (counted.turns.values[("append",)], counted.turns.values[("closed",)]) == (1, 1)
    assert counted.turn_seconds.count() == 0


def test_deadlines_are_met_or_missed(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2, deadline_ms=50.0)
    driver.post(1, [5], max_tokens=100, deadline_ms=50.0)
    waiting, _ = driver.post(1, [5], max_tokens=1, deadline_ms=50.0)
    driver.engine.step()
    driver.clock.now_s += 1
    driver.run()
    assert waiting.code == "DEADLINE_EXCEEDED"
    driver.turn(1, [5], max_tokens=1, deadline_ms=0.0)  # else it has what START has set
    assert metrics(driver).deadlines.values == {("met",): 1, ("missed",): 2}


def test_an_answer_of_a_grammar_that_is_whole_meets_its_deadline() -> None:
    """It was counted neither as met nor as missed."""
    driver = FakeDriver(max_context=256, eos_ids=frozenset(FAKE_ENDS), grammars=fake_grammars())
    answer = driver.turn(1, [5], start=True, max_tokens=100, regex="[0-9]{4}", deadline_ms=60_000.0)
    assert answer.status.finish_reason == "complete"
    assert metrics(driver).deadlines.values == {("met",): 1, ("missed",): 0}


def test_rewinds_are_counted_with_what_they_cut(driver: FakeDriver) -> None:
    driver.turn(1, [5, 6, 7, 8], start=True, max_tokens=0)
    driver.turn(1, [9], rewind_to=1, max_tokens=0)
    driver.turn(1, [9], rewind_to=2, max_tokens=0)
    assert (metrics(driver).rewinds.total(), metrics(driver).rewound_tokens.total()) == (1, 3), "one cuts nothing"


def test_a_repetition_is_no_turn(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, turn=0)
    driver.turn(1, [5], start=True, turn=0)
    driver.post(1, [6], turn=1, max_tokens=3)
    driver.engine.step()
    driver.turn(1, [6], turn=1, max_tokens=3)
    assert (metrics(driver).turns.total(), metrics(driver).repetitions.total()) == (2, 2)


def test_prefixes_hit_and_miss() -> None:
    driver = FakeDriver()
    prompt = [*range(3 * driver.pool.page_size + 1)]
    driver.turn(1, prompt, start=True, max_tokens=0)
    driver.turn(2, prompt, start=True, max_tokens=0)
    num_hit = 3 * driver.pool.page_size
    assert metrics(driver).prefix_tokens.values == {("hit",): num_hit, ("miss",): 2 * len(prompt) - num_hit}


def test_a_failed_pass_is_counted_and_so_are_its_turns(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    driver.runner.error = RuntimeError("out of memory")
    with caplog.at_level(logging.CRITICAL):
        assert driver.turn(1, [5], start=True, max_tokens=2).code == "INTERNAL"
    counted = metrics(driver)
    assert (counted.step_failures.total(), counted.turn_errors.values[("INTERNAL",)]) == (1, 1)
    assert counted.step_seconds.count() == 0


def test_a_health_turn_without_room_is_no_refusal() -> None:
    """Of a full server each one counted, every two seconds: who has it was paged, though no client was refused."""
    driver = FakeDriver(max_sessions=1)
    driver.turn(1, [5], start=True, max_tokens=0)
    assert driver.turn("health-1", start=True, end=True).code == "RESOURCE_EXHAUSTED"
    assert metrics(driver).turn_errors.total() == 0
    assert driver.turn(2, [5], start=True, end=True).code == "RESOURCE_EXHAUSTED"
    assert metrics(driver).turn_errors.values[("RESOURCE_EXHAUSTED",)] == metrics(driver).turn_errors.total() == 1


# ---- lines -----------------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, logger: str = "microturn.sessions") -> list[tuple[str, dict[str, Any]]]:
    return [(record.getMessage(), record.fields) for record in caplog.records if record.name == logger]


def test_a_session_leaves_a_line_as_it_begins_and_as_it_ends(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    driver.turn(1, [5, 6], start=True, max_tokens=1)
    driver.turn(2, [7], start=True, fork_of="1", max_tokens=0, idle_timeout_s=5)
    driver.turn(1, [8], end=True, max_tokens=0)
    driver.turn(3, [5], start=True, max_tokens=0)
    driver.turn(3, [5], start=True, max_tokens=0)
    driver.clock.now_s += 6
    driver.steps(1)
    driver.engine.stop()
    said = [(event, fields["session"]) for event, fields in lines(caplog)]
    assert said == [
        ("session opened", "1"),
        ("session opened", "2"),
        ("session closed", "1"),
        ("session opened", "3"),
        ("session replaced", "3"),
        ("session opened", "3"),
        ("session expired", "2"),
        ("session stopped", "3"),
    ]
    fields = dict(zip(said, (fields for _, fields in lines(caplog)), strict=True))
    assert fields["session opened", "2"] == {"session": "2", "origin": "fork", "context_len": 4, "kv_len": 0}
    assert fields["session closed", "1"] == {"session": "1", "context_len": 4, "num_turns": 2, "active_s": 0.0}
    assert lines(caplog, "microturn.turns") == []


def test_how_a_server_is_tried_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(log_turns="all")
    caplog.set_level(logging.INFO)
    driver.turn("health-1", start=True, end=True)
    assert lines(caplog) == lines(caplog, "microturn.turns") == []
    assert metrics(driver).sessions_ended.values[("closed",)] == 1


@pytest.mark.parametrize("log_turns", ["none", "all", "text"])
def test_what_users_say_is_logged_on_demand_only(caplog: pytest.LogCaptureFixture, log_turns: str) -> None:
    driver = FakeDriver(log_turns=log_turns)
    caplog.set_level(logging.INFO)
    answer = driver.turn(1, TextInput(SECRET), start=True, max_tokens=2)
    assert driver.turn(1, [5], max_token=3, options='{"max_tokens": 100000}').code == "CONTEXT_FULL"
    turns = lines(caplog, "microturn.turns")
    if log_turns == "none":
        assert turns == []
        return
    (_, ended), (_, refused) = turns
    assert (ended["session"], ended["finish_reason"], ended["output_tokens"]) == ("1", "length", 2)
    assert {"queue_ms", "prefill_ms", "decode_ms", "total_ms"} <= ended.keys()
    assert refused["code"] == "CONTEXT_FULL"
    if log_turns == "text":
        assert (ended["input"], ended["output"]) == (SECRET, answer.text)
    else:
        assert SECRET not in str(turns)
        assert answer.text not in str(turns)
