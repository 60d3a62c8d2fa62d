"""Tests of engine on an asynchronous runner: while a pass is under way, the model has been given the next one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from microturn.engine import steps
from microturn.engine.maintenance import Maintenance
from microturn.engine.step_time import StepTimeModel
from microturn.kv.window import Window
from microturn.model.batch import Batch
from support.driver import Recorder
from support.fake_runner import VOCAB_SIZE, FakeDriver, expected_tokens
from support.late_draws import late_draw
from support.threads import ThreadedDriver, starting_engines

# What its first three tokens must be; the second one ends it where it is a stop.
PROMPT = [5, 6, 7]
FIRST, SECOND, THIRD = expected_tokens(PROMPT, 3)
STOPS: dict[str, Any] = {"stop_token_ids": json.dumps([SECOND]), "max_tokens": 10}
PASS_S = 0.01


class AheadDriver(FakeDriver):
    """An engine that runs ahead, and what happens to its passes, each by its number.

    A pass takes its time from when the one before is over, and it is over when its tokens are asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> None:
        super().__init__(is_asynchronous=True, **kwargs)
        self.events: list[str] = []
        self._num_asked = 0
        self._runs, self.runner.run = self.runner.run, self._launch
        monkeypatch.setattr(steps, "draw", partial(late_draw, asked=self._process_result))

    @property
    def num_passes(self) -> int:
        return len(self.runner.batches)

    @property
    def rows(self) -> list[int]:
        """Rows of each pass."""
        return [len(batch.rows) for batch in self.runner.batches]

    @property
    def ahead(self) -> list[int]:
        """Passes that the model was given before the one before was over."""
        return [number for number, batch in enumerate(self.runner.batches, start=1) if batch.ids is not None]

    @property
    def is_in_flight(self) -> bool:
        return self.engine._in_flight is not None

    def num_pages_of(self, session_id: int) -> int:
        session = self.engine._sessions.find(session_id)
        assert session is not None
        return len(session.table.pages)

    def _launch(self, batch: Batch) -> Any:
        self.events.append(f"launch {self.num_passes + 1}")
        return self._runs(batch)

    def _process_result(self) -> None:
        self._num_asked += 1
        self.events.append(f"land {self._num_asked}")
        self.clock.now_s += PASS_S


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> AheadDriver:
    return AheadDriver(monkeypatch, max_context=64)


def go_on(driver: FakeDriver, history: list[int], session_id: int = 1) -> None:
    """The session is what the history says: its next turn shows that."""
    answer = driver.turn(session_id, [8], max_tokens=3, stop_token_ids="[]")
    assert answer.token_ids == expected_tokens([*history, 8], 3)
    assert answer.status.context_len == len(history) + 4


# ---- one step ahead ------------------------------------------------------------------------------------------------


def test_the_next_pass_is_given_to_the_model_before_the_tokens_of_this_one_are_asked_for(driver: AheadDriver) -> None:
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=4)
    driver.run()
    assert answer.token_ids == expected_tokens(PROMPT, 4)
    assert driver.events == [
        *("launch 1", "launch 2", "land 1"),
        *("launch 3", "land 2"),
        *("launch 4", "land 3"),
        "land 4",
    ]
    assert answer.status.usage["computed_tokens"] == 6


def test_without_an_asynchronous_runner_a_pass_is_over_before_the_next_one_begins(driver: AheadDriver) -> None:
    driver.runner.is_asynchronous = False
    driver.turn(1, PROMPT, start=True, max_tokens=3)
    assert driver.events == ["launch 1", "land 1", "launch 2", "land 2", "launch 3", "land 3"]
    assert driver.ahead == []


def test_a_step_ends_one_pass(driver: AheadDriver) -> None:
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=10)
    for number in range(1, 11):
        assert driver.engine.step() == (number < 10)
        assert len(answer.token_ids) == number


def test_no_pass_is_made_for_tokens_that_nobody_may_have(driver: AheadDriver) -> None:
    """B17 to B20: tokens beyond max_tokens were computed, and kept."""
    for session_id, max_tokens in enumerate((1, 2, 5, 0, 7)):
        driver.post(session_id, PROMPT, start=True, max_tokens=max_tokens)
    driver.run()
    assert driver.rows == [5, 3, 2, 2, 2, 1, 1]
    assert not driver.is_in_flight


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "logprobs": True},
    {"min_tokens": 4, "stop_token_ids": json.dumps(list(range(0, VOCAB_SIZE, 2)))},
    {"temperature": 0.8, "seed": 8, "min_tokens": 2, "stop_token_ids": json.dumps(list(range(0, VOCAB_SIZE, 3)))},
    {"stop": json.dumps([f"<{token_id}>" for token_id in range(0, VOCAB_SIZE, 7)])},
]


@pytest.mark.parametrize("max_batch_tokens", [4, 64])
def test_what_is_said_is_the_same_as_without_running_ahead(
    monkeypatch: pytest.MonkeyPatch, max_batch_tokens: int
) -> None:
    def talk(driver: FakeDriver) -> list[Any]:
        heard = []
        for number in range(3):
            answers = [
                driver.post(n, [n, number, 7], start=number == 0, max_tokens=3 + 2 * n, **options)[0]
                for n, options in enumerate(OPTIONS)
            ]
            driver.run()
            heard += [(answer.outputs, answer.status.finish_reason) for answer in answers]
        return [
            [(output.token_ids, output.text, output.position, output.logprobs) for output in outputs] + [reason]
            for outputs, reason in heard
        ]

    driver = AheadDriver(monkeypatch, max_batch_tokens=max_batch_tokens)
    assert talk(driver) == talk(FakeDriver(max_batch_tokens=max_batch_tokens))
    assert len(driver.ahead) > driver.num_passes / 4


def test_a_window_slides_while_the_engine_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AheadDriver(monkeypatch, max_context=40, window_slack=4)
    window = Window(num_sinks=4, length=8, slack=4)
    options: dict[str, Any] = {"start": True, "overflow": "window", "sink_tokens": 4, "window_tokens": 8}
    history: list[int] = []
    for _ in range(5):
        history += [1, 2]
        answer = driver.turn(1, [1, 2], max_tokens=18, **options)
        assert answer.token_ids == expected_tokens(history, 18, window=window)
        history += answer.token_ids
        options = {}
    assert len(driver.ahead) == 5 * 17


def test_the_layers_own_windows_slide_too(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AheadDriver(monkeypatch, window=5, window_slack=8)
    history = [*range(30)]
    history += driver.turn(1, history, start=True, max_tokens=20).token_ids
    assert history == [*range(30), *expected_tokens(range(30), 20)]
    go_on(driver, history)


def test_the_time_of_a_pass_is_counted_from_the_end_of_the_one_before(driver: AheadDriver) -> None:
    driver.turn(1, PROMPT, start=True, max_tokens=6)
    seconds = driver.engine.recorder.metrics.step_seconds
    samples = {name: number for (name, _), number in driver.engine._maintenance.measure().items()}
    assert samples["microturn_step_seconds_count"] == 6, seconds
    assert samples["microturn_step_seconds_sum"] == pytest.approx(6 * PASS_S)


# ---- a turn that ends while its next token is computed ---------------------------------------------------------------


def test_a_turn_that_stops_drops_its_row_in_the_pass_under_way(driver: AheadDriver) -> None:
    answer, _ = driver.post(1, PROMPT, start=True, **STOPS)
    driver.engine.step()
    assert driver.engine.step(), "a pass is under way"
    assert answer.status.finish_reason == "stop"
    assert answer.status.usage["computed_tokens"] == 4
    assert driver.is_in_flight
    driver.run()
    assert answer.token_ids == [FIRST, SECOND]
    assert driver.rows == [1, 1, 1]
    go_on(driver, [*PROMPT, FIRST, SECOND])


def test_others_go_on_in_the_pass_whose_row_was_dropped(driver: AheadDriver) -> None:
    stopped, _ = driver.post(1, PROMPT, start=True, **STOPS)
    answer, _ = driver.post(2, [9], start=True, max_tokens=6)
    driver.run()
    assert stopped.token_ids == [FIRST, SECOND]
    assert answer.token_ids == expected_tokens([9], 6)
    assert driver.rows == [2, 2, 2, 1, 1, 1]
    assert driver.ahead == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("prompt_len", range(1, 9))
def test_the_page_for_a_token_that_never_came_is_given_back(driver: AheadDriver, prompt_len: int) -> None:
    """Whether or not the place behind the end is in a page of its own."""
    prompt = list(range(prompt_len))
    stop = expected_tokens(prompt, 2)[1]
    driver.turn(1, prompt, start=True, max_tokens=10, stop_token_ids=json.dumps([stop]))
    history = [*prompt, *expected_tokens(prompt, 2)]
    assert driver.num_pages_of(1) == -(-(len(history) - 1) // 4)
    go_on(driver, history)
    driver.turn(1, end=True)
    assert driver.pool.num_free == driver.pool.num_pages


@pytest.mark.parametrize("rewind_to", [None, 0, 2, 4, 5])
def test_the_turn_behind_one_that_stops_does_not_take_its_row(driver: AheadDriver, rewind_to: int | None) -> None:
    """It begins with the same session's token, while what follows from the old one is still under way."""
    values = {} if rewind_to is None else {"rewind_to": rewind_to}
    stopped, _ = driver.post(1, PROMPT, start=True, **STOPS)
    answer, _ = driver.post(1, [9, 10], max_tokens=4, **values)
    driver.run()
    assert stopped.token_ids == [FIRST, SECOND]
    history = [*[*PROMPT, FIRST, SECOND][:rewind_to], 9, 10]
    assert answer.token_ids == expected_tokens(history, 4)
    assert answer.status.usage["output_tokens"] == 4
    go_on(driver, [*history, *answer.token_ids])


def test_the_turn_behind_one_that_stops_is_computed_right_behind_the_pass_under_way(driver: AheadDriver) -> None:
    """And others go on ahead."""
    driver.post(1, PROMPT, start=True, **STOPS)
    answer, _ = driver.post(1, [10], max_tokens=3)
    driver.post(2, [9], start=True, max_tokens=20)
    driver.run()
    assert driver.rows[:4] == [2, 2, 2, 2]
    assert [len(row.token_ids) for row in driver.runner.batches[3].rows] == [1, 2]
    assert driver.ahead == list(range(2, driver.num_passes + 1))
    assert answer.token_ids == expected_tokens([*PROMPT, FIRST, SECOND, 10], 3)


@pytest.mark.parametrize("rewind_to", [0, 3, 4, 5])
def test_a_session_is_cut_back_right_after_it_stopped(driver: AheadDriver, rewind_to: int) -> None:
    driver.post(1, PROMPT, start=True, **STOPS)
    driver.steps(2)
    answer, _ = driver.post(1, [9], max_tokens=3, rewind_to=rewind_to)
    assert driver.is_in_flight
    driver.run()
    history = [*[*PROMPT, FIRST, SECOND][:rewind_to], 9]
    assert answer.token_ids == expected_tokens(history, 3)


@pytest.mark.parametrize("prompt_len", range(1, 9))
def test_a_session_is_forked_right_after_it_stopped(driver: AheadDriver, prompt_len: int) -> None:
    prompt = list(range(prompt_len))
    stop = expected_tokens(prompt, 2)[1]
    driver.post(1, prompt, start=True, max_tokens=10, stop_token_ids=json.dumps([stop]))
    driver.steps(2)
    answer, _ = driver.post(2, [9], start=True, max_tokens=3, fork_of="1")
    assert driver.is_in_flight
    driver.run()
    history = [*prompt, *expected_tokens(prompt, 2)]
    assert answer.token_ids == expected_tokens([*history, 9], 3)
    go_on(driver, history)
    go_on(driver, [*history, 9, *answer.token_ids], session_id=2)


@pytest.mark.parametrize("prompt_len", range(5, 9))
def test_what_others_may_share_of_a_first_turn_ends_before_the_dropped_row(
    monkeypatch: pytest.MonkeyPatch, prompt_len: int
) -> None:
    driver = AheadDriver(monkeypatch, share_prefixes=True)
    prompt = list(range(prompt_len))
    said = expected_tokens(prompt, 2)
    driver.post(1, prompt, start=True, max_tokens=10, stop_token_ids=json.dumps([said[1]]))
    driver.steps(2)
    answer, _ = driver.post(2, [*prompt, *said, 9], start=True, max_tokens=3)
    driver.run()
    assert answer.token_ids == expected_tokens([*prompt, *said, 9], 3)
    assert answer.status.usage["cached_tokens"] == (len(prompt) + 1) // 4 * 4


def test_a_session_that_closes_as_it_stops_is_gone(driver: AheadDriver) -> None:
    answer, _ = driver.post(1, PROMPT, start=True, end=True, **STOPS)
    driver.steps(2)
    assert answer.status.finish_reason == "stop"
    assert len(driver.engine._sessions) == 0
    assert driver.pool.num_free == driver.pool.num_pages
    driver.run()
    assert driver.turn(1, PROMPT, start=True, max_tokens=2).token_ids == [FIRST, SECOND]


# ---- what comes while a pass is under way ----------------------------------------------------------------------------


def begun(driver: AheadDriver, **values: Any) -> tuple[Recorder, Any]:
    """A turn that has said one token, and whose next one is being computed."""
    answer, turn = driver.post(1, PROMPT, start=True, **{"max_tokens": 20} | values)
    driver.steps(1)
    assert driver.is_in_flight
    return answer, turn


def test_a_turn_that_comes_is_computed_right_behind_the_pass_under_way(driver: AheadDriver) -> None:
    """Together with what follows from that one, before it is over."""
    running, _ = begun(driver)
    answer, _ = driver.post(2, [9, 10], start=True, max_tokens=3)
    driver.run()
    assert driver.rows[:6] == [1, 1, 2, 2, 2, 1]
    assert driver.ahead == list(range(2, 21))
    assert answer.token_ids == expected_tokens([9, 10], 3)
    assert running.token_ids == expected_tokens(PROMPT, 20)


def test_the_turns_of_many_that_come_and_go_never_end_running_ahead(driver: AheadDriver) -> None:
    """Each is as if it were alone, penalties and log probabilities included."""
    options: dict[str, Any] = {"repetition_penalty": 1.5, "temperature": 0.7, "seed": 3, "logprobs": True}
    begun(driver, max_tokens=40)
    answers = []
    for number in range(12):
        answers.append(driver.post(2 + number % 4, [number, 7], start=number < 4, max_tokens=3, **options)[0])
        driver.steps(2)
    driver.run()
    assert driver.ahead == list(range(2, driver.num_passes + 1))
    assert max(driver.rows) == 3
    alone = FakeDriver(max_context=64)
    for number, answer in enumerate(answers):
        expected = alone.turn(2 + number % 4, [number, 7], start=number < 4, max_tokens=3, **options)
        assert [output.logprobs for output in answer.outputs] == [output.logprobs for output in expected.outputs]
        assert answer.token_ids == expected.token_ids


def test_a_turn_whose_rows_are_dropped_begins_anew_behind_them(driver: AheadDriver) -> None:
    """Its session has a row under way that nobody wants any more, and one behind it."""
    driver.post(1, PROMPT, start=True, **STOPS)
    driver.steps(2)
    assert driver.is_in_flight
    answer, _ = driver.post(1, [9], max_tokens=3)
    driver.run()
    assert driver.ahead == [2, 3, 5, 6]
    assert answer.token_ids == expected_tokens([*PROMPT, FIRST, SECOND, 9], 3)


@pytest.mark.parametrize("rewind_to", [None, 3, 4, 1000])
def test_an_interrupt_drops_the_row_of_the_pass_under_way(driver: AheadDriver, rewind_to: int | None) -> None:
    values = {} if rewind_to is None else {"rewind_to": rewind_to}
    answer, _ = begun(driver)
    over, _ = driver.post(1, [9], max_tokens=3, on_overlap="interrupt", **values)
    driver.run()
    assert answer.status.finish_reason == "interrupted"
    assert answer.token_ids == [FIRST], "what is under way is not waited for"
    history = [*[*PROMPT, FIRST][:rewind_to], 9]
    assert over.token_ids == expected_tokens(history, 3)


def test_a_turn_is_cancelled_behind_the_pass_under_way(driver: AheadDriver) -> None:
    answer, turn = begun(driver)
    driver.engine.cancel(turn)
    driver.run()
    assert answer.status.finish_reason == "cancelled"
    assert answer.status.context_len == 0
    assert driver.num_pages_of(1) == 0
    go_on(driver, [])


def test_a_session_closes_behind_the_pass_under_way(driver: AheadDriver) -> None:
    answer, _ = begun(driver)
    driver.post(1, end=True, on_overlap="interrupt")
    driver.run()
    assert answer.status.finish_reason == "interrupted"
    assert driver.pool.num_free == driver.pool.num_pages


def test_a_session_begins_anew_behind_the_pass_under_way(driver: AheadDriver) -> None:
    answer, _ = begun(driver)
    again, _ = driver.post(1, [9], start=True, max_tokens=3)
    driver.run()
    assert answer.status.finish_reason == "cancelled"
    assert again.token_ids == expected_tokens([9], 3)


def test_a_deadline_that_passes_ends_the_turn_behind_the_pass_under_way(driver: AheadDriver) -> None:
    answer, _ = begun(driver, deadline_ms=100)
    driver.clock.now_s += 1
    driver.steps(1)
    assert answer.status.finish_reason == "deadline"
    assert answer.token_ids == [FIRST, SECOND]
    assert driver.num_passes == 2
    go_on(driver, [*PROMPT, FIRST, SECOND])


def test_nothing_is_begun_ahead_that_would_hold_up_what_is_due_before_it(driver: AheadDriver) -> None:
    """Without that a deadline was kept a pass later than without running ahead."""
    driver.engine.steps.step_time = StepTimeModel([(1, PASS_S), (64, PASS_S)])
    answer, _ = driver.post(1, PROMPT, start=True, max_tokens=20, deadline_ms=1e3 * 3.5 * PASS_S)
    driver.run()
    assert answer.status.finish_reason == "deadline"
    assert len(answer.token_ids) == 4
    assert driver.ahead == [2, 3, 4]


def test_a_session_expires_though_others_go_on(driver: AheadDriver) -> None:
    driver.turn(2, [5], start=True, max_tokens=1, idle_timeout_s=5 * PASS_S)
    begun(driver, max_tokens=40)
    driver.steps(10)
    assert driver.engine._sessions.find(2) is None


def test_an_engine_that_stops_has_done_with_the_pass_under_way(driver: AheadDriver) -> None:
    answer, _ = begun(driver)
    driver.engine.stop()
    assert answer.code == "UNAVAILABLE"
    assert not driver.engine.step()
    assert answer.token_ids == [FIRST]


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedDriver]:
    monkeypatch.setattr(steps, "draw", late_draw)
    with starting_engines() as start:
        yield start(is_asynchronous=True, num_pages=4096, max_context=16_000)


def test_what_is_done_between_two_steps_meets_no_pass_under_way(threaded: ThreadedDriver) -> None:
    """A session that is copied, or put to rest, must not be one whose token comes a moment later."""
    assert threaded.ask(1, PROMPT, start=True, max_tokens=15_000).begun.wait(10)
    in_flight_steps = [threaded.engine.call(lambda _: threaded.engine._in_flight) for _ in range(50)]
    assert in_flight_steps == [None] * 50
    assert threaded.engine.call(Maintenance.describe)[0]["state"] == "running"
    (at_rest,) = threaded.engine.call(Maintenance.quiesce)
    assert len(at_rest.context) == 0
    assert any(batch.ids is not None for batch in threaded.runner.batches)


def test_interrupts_as_fast_as_passes_keep_nobody_from_its_first_token(driver: AheadDriver) -> None:
    """Each takes the place of the one before, but not of its first pass."""
    history = list(PROMPT)
    answers = [driver.post(1, PROMPT, start=True, max_tokens=20)[0]]
    for number in range(6):
        driver.steps(1)
        answers.append(driver.post(1, [number], max_tokens=20, on_overlap="interrupt")[0])
    driver.run()
    for number, answer in enumerate(answers):
        assert answer.token_ids
        assert answer.token_ids == expected_tokens(history, len(answer.token_ids))
        history += [*answer.token_ids, number]


def test_a_step_of_the_tiers_begins_before_anybody_asks_for_kv(
    driver: AheadDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for before, a copy on its way counted as one that nobody wanted any more, and was read again and again."""
    tiers, events = driver.engine._tiers, []
    for name in ("begin_step", "is_ready", "end_step"):
        done = getattr(tiers, name)
        monkeypatch.setattr(tiers, name, lambda *of, name=name, done=done: events.append(name) or done(*of))
    begun(driver)
    for session_id in range(2, 6):
        driver.post(session_id, [9, session_id], start=True, max_tokens=3)
        driver.steps(1)
    driver.run()
    steps_of_tiers = "".join({"begin_step": "(", "is_ready": "r", "end_step": ")"}[name] for name in events)
    assert re.fullmatch(r"(\(r*\))+", steps_of_tiers)
    assert steps_of_tiers.count("r") == 5
    assert len(driver.ahead) > 10


# ---- when somebody would miss a step, nobody runs ahead --------------------------------------------------------------


def test_a_long_prompt_is_computed_before_anybody_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AheadDriver(monkeypatch, max_batch_tokens=8)
    prompt = list(range(40))
    short, _ = driver.post(1, PROMPT, start=True, max_tokens=12)
    long, _ = driver.post(2, prompt, start=True, max_tokens=3)
    driver.run()
    assert short.token_ids == expected_tokens(PROMPT, 12)
    assert long.token_ids == expected_tokens(prompt, 3)
    assert driver.ahead
    is_long = [len(row.token_ids) > 1 for batch in driver.runner.batches for row in batch.rows if row.position]
    assert any(is_long)
    for number in driver.ahead:
        before = driver.runner.batches[number - 2]
        assert all(row.wants_logits for row in before.rows)


def test_an_input_that_is_only_appended_holds_nobody_up(driver: AheadDriver) -> None:
    driver.post(1, PROMPT, start=True, max_tokens=6)
    driver.post(2, [9] * 9, start=True, max_tokens=0)
    driver.run()
    assert driver.rows == [2, 1, 1, 1, 1, 1]
    assert driver.ahead == [2, 3, 4, 5, 6]


def test_a_turn_that_waits_for_the_end_of_another_does_not_wait_for_more(driver: AheadDriver) -> None:
    driver.post(1, PROMPT, start=True, max_tokens=6)
    driver.post(2, [9], start=True, max_tokens=2)
    driver.post(2, [10], max_tokens=1)
    driver.run()
    assert driver.rows == [2, 2, 2, 1, 1, 1]
    assert driver.ahead == [2, 4, 5, 6], "the third pass began when the second was over"


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}]
)
def test_a_turn_with_penalties_ends_running_ahead_for_nobody(driver: AheadDriver, penalty: dict[str, float]) -> None:
    """A choice that depends on the token before it waited for that token on the host, and everybody waited with it."""
    values: dict[str, Any] = {"start": True, "max_tokens": 8, "temperature": 0.5, "seed": 1, **penalty}
    alone = FakeDriver(max_context=64).turn(1, PROMPT, **values)
    other, _ = driver.post(2, PROMPT, start=True, max_tokens=8)
    answer, _ = driver.post(1, PROMPT, **values)
    driver.run()
    assert answer.token_ids == alone.token_ids
    assert other.token_ids == expected_tokens(PROMPT, 8)
    assert driver.ahead == [2, 3, 4, 5, 6, 7, 8]


def test_a_token_that_is_not_known_yet_counts_as_often_as_it_came(driver: AheadDriver) -> None:
    """With a reward for repeating, the token just chosen comes again and again, each time counted once more."""
    values: dict[str, Any] = {"start": True, "max_tokens": 12, "frequency_penalty": -0.7}
    alone = FakeDriver(max_context=64).turn(1, PROMPT, **values)
    answer, _ = driver.post(1, PROMPT, **values)
    driver.run()
    assert answer.token_ids == alone.token_ids
    assert len(set(answer.token_ids)) < 12
    assert driver.ahead == list(range(2, 13))


def test_where_the_pool_is_full_nobody_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page for a token that may never come is not taken from anybody."""
    driver = AheadDriver(monkeypatch, num_pages=4, max_context=16)
    driver.turn(3, [9] * 8, start=True, max_tokens=0)
    answer, _ = driver.post(1, [5] * 6, start=True, max_tokens=8)
    driver.steps(2)
    assert driver.pool.num_free == 0
    assert driver.num_pages_of(3) == 2
    driver.run()
    assert answer.token_ids == expected_tokens([5] * 6, 8)
    assert driver.num_pages_of(3) == 0, "the parked session gave way to a token that was sure"
    assert driver.ahead == [3, 4, 6, 7, 8, 9]


def test_sessions_that_want_more_than_the_pool_has_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = AheadDriver(monkeypatch, num_pages=10, max_context=32, host_tier_bytes=10_000)
    prompts = {n: [n] * (3 + n) for n in range(1, 6)}
    answers = {n: driver.post(n, prompt, start=True, max_tokens=20)[0] for n, prompt in prompts.items()}
    driver.run()
    for n, answer in answers.items():
        assert answer.token_ids == expected_tokens(prompts[n], 20)
    assert driver.ahead


# ---- passes that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attribute", ["error", "late_error"])
def test_a_pass_that_fails_ahead_fails_its_turns_once_the_one_before_is_over(
    driver: AheadDriver, caplog: pytest.LogCaptureFixture, attribute: str
) -> None:
    history = [*PROMPT, *driver.turn(1, PROMPT, start=True, max_tokens=2).token_ids]
    ending, _ = driver.post(2, [9], start=True, max_tokens=1)
    answer, _ = driver.post(1, [10], max_tokens=9)
    driver.engine._take_posts(block=False)
    running = driver.runner.run

    def fail_the_second(batch: Batch) -> Any:
        if batch.ids is not None:
            setattr(driver.runner, attribute, RuntimeError("out of memory"))
        return running(batch)

    driver.runner.run = fail_the_second  # type: ignore[method-assign]
    driver.steps(1)
    assert ending.token_ids == expected_tokens([9], 1), "it was over before"
    assert len(answer.token_ids) == 1
    driver.runner.run = running  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        driver.run()
    assert str(answer.error) == "INTERNAL: the forward pass failed, nothing was appended: out of memory"
    assert "a forward pass of 1 rows failed" in caplog.text
    go_on(driver, history)


def test_nothing_is_committed_of_a_pass_on_top_of_one_that_failed(
    driver: AheadDriver, caplog: pytest.LogCaptureFixture
) -> None:
    history = [*PROMPT, *driver.turn(1, PROMPT, start=True, max_tokens=2).token_ids]
    num_passes = driver.num_passes
    answer, _ = driver.post(1, [10], max_tokens=9)
    waiting, _ = driver.post(1, [11], max_tokens=3)
    driver.runner.late_error = RuntimeError("an illegal address")
    with caplog.at_level(logging.ERROR):
        driver.steps(1)
        assert driver.is_in_flight
        assert answer.code == "INTERNAL"
        driver.run()
    assert answer.token_ids == []
    assert waiting.token_ids == expected_tokens([*history, 11], 3)
    assert driver.num_passes == num_passes + 2 + 3
    assert driver.engine.recorder.metrics.step_failures.total() == 1
    go_on(driver, [*history, 11, *waiting.token_ids])


def test_a_pass_ahead_of_turns_that_have_all_ended_may_fail_and_hurts_nobody(
    driver: AheadDriver, caplog: pytest.LogCaptureFixture
) -> None:
    answer, _ = driver.post(1, PROMPT, start=True, **STOPS)
    driver.steps(1)
    driver.runner.late_error = RuntimeError("an illegal address")
    with caplog.at_level(logging.ERROR):
        driver.run()
    assert answer.token_ids == [FIRST, SECOND]
    assert driver.engine.recorder.metrics.step_failures.total() == 1
    go_on(driver, [*PROMPT, FIRST, SECOND])
