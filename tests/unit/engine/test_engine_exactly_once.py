"""Tests of engine: numbered turns, which are done once however often they are sent."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from microturn.sessions.inputs import EmbedInput, TextInput, TurnInput
from support.driver import Recorder
from support.fake_runner import HIDDEN_SIZE, VOCAB_SIZE, FakeDriver, expected_tokens

PROMPT = [5, 6, 7]
KEPT = 3  # answers: one turn runs and two wait


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=256, max_queued_turns=KEPT - 1)


def open_session(driver: FakeDriver, **values: Any) -> list[int]:
    """A session whose turn 0 has ended; its history."""
    return [*PROMPT, *driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4, **values).token_ids]


def check_replay(driver: FakeDriver, first: Recorder, again: Recorder, num_passes: int) -> None:
    """The same answer in one piece, and no forward pass for it."""
    assert len(driver.runner.batches) == num_passes
    assert len(again.outputs) == 1
    assert (again.token_ids, again.text) == (first.token_ids, first.text)
    assert again.outputs[0].position == first.outputs[0].position
    assert again.outputs[0].logprobs == sum((output.logprobs for output in first.outputs), ())
    assert again.outputs[0].top_logprobs == sum((output.top_logprobs for output in first.outputs), ())
    assert again.outputs[0].appended_ids == first.outputs[-1].appended_ids
    assert again.status.replayed
    assert not first.status.replayed
    assert (again.status.turn, again.status.context_len, again.status.usage, again.status.finish_reason) == (
        first.status.turn,
        first.status.context_len,
        first.status.usage,
        first.status.finish_reason,
    )


# ---- a turn that has ended -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [[8, 9], [], TextInput("ab"), EmbedInput(torch.arange(8.0).reshape(2, HIDDEN_SIZE))],
    ids=["ids", "nothing", "text", "embeddings"],
)
def test_a_turn_that_is_sent_again_is_answered_from_the_record(driver: FakeDriver, given: TurnInput) -> None:
    """B12: a client that comes back and sends its turn again had it appended twice, or was refused."""
    driver = FakeDriver(max_context=256)
    open_session(driver)
    values: dict[str, Any] = {"turn": 1, "max_tokens": 3, "logprobs": 2, "return_appended_ids": True}
    first = driver.turn(1, given, **values)
    num_passes = len(driver.runner.batches)
    check_replay(driver, first, driver.turn(1, given, **values), num_passes)
    assert driver.turn(1).status.context_len == first.status.context_len


def test_start_is_answered_from_its_record_and_does_not_begin_anew(driver: FakeDriver) -> None:
    """It reset the session that it had opened itself."""
    first = driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4, seed=3)
    later = driver.turn(1, [8], max_tokens=2)
    num_passes = len(driver.runner.batches)
    check_replay(driver, first, driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4, seed=3), num_passes)
    assert driver.turn(1).status.context_len == later.status.context_len


def test_start_without_a_number_begins_anew(driver: FakeDriver) -> None:
    open_session(driver)
    assert driver.turn(1, PROMPT, start=True, max_tokens=4).status.turn == 0
    assert driver.turn(1).status.context_len == 7


def test_start_begins_anew_when_the_session_has_ended(driver: FakeDriver) -> None:
    open_session(driver)
    driver.turn(1, end=True)
    again = driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4)
    assert not again.status.replayed
    assert again.token_ids == expected_tokens(PROMPT, 4)


@pytest.mark.parametrize("number", [1, 7])
def test_start_is_turn_zero(driver: FakeDriver, number: int) -> None:
    refused = driver.turn(1, PROMPT, start=True, turn=number)
    assert str(refused.error) == "INVALID_ARGUMENT: START is turn 0: go on with a session that lives by resume"
    assert driver.turn(1).code == "NOT_FOUND"


def test_a_turn_is_answered_from_the_record_to_who_comes_back_by_resume(driver: FakeDriver) -> None:
    open_session(driver)
    first = driver.turn(1, [8], turn=1, max_tokens=3)
    num_passes = len(driver.runner.batches)
    again = driver.turn(1, [8], turn=1, max_tokens=3, start=True, resume=True)
    check_replay(driver, first, again, num_passes)


@pytest.mark.parametrize(
    "values",
    [{"deadline_ms": 9000}, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}, {"max_tokens": "3"}],
)
def test_how_a_turn_is_delivered_is_not_its_content(driver: FakeDriver, values: dict[str, Any]) -> None:
    open_session(driver)
    driver.turn(1, [8], turn=1, max_tokens=3)
    assert driver.turn(1, [8], **{"turn": 1, "max_tokens": 3, **values}).status.replayed


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ([9], {}),
        ([8, 8], {}),
        ([], {}),
        (TextInput("\x08"), {}),
        ([8], {"max_tokens": 4}),
        ([8], {"seed": 1}),
        ([8], {"rewind_to": 7}),
        ([8], {"on_overlap": "interrupt"}),
        ([8], {"end": True}),
    ],
)
def test_other_content_under_a_number_that_is_taken_is_refused(
    driver: FakeDriver, given: list[int], values: dict[str, Any]
) -> None:
    history = open_session(driver)
    history += [8, *driver.turn(1, [8], turn=1, max_tokens=3).token_ids]
    num_passes = len(driver.runner.batches)
    refused = driver.turn(1, given, **{"turn": 1, "max_tokens": 3, **values})
    assert str(refused.error) == (
        "INVALID_ARGUMENT: turn 1 came before with other content, perhaps from another client that goes on with this "
        "session too: repeat it as it was, or number it anew, and let one client at a time speak for a session"
    )
    assert len(driver.runner.batches) == num_passes
    if "end" not in values:  # END closes all the same
        assert driver.turn(1, [10], turn=2, max_tokens=2).token_ids == expected_tokens([*history, 10], 2)


def test_other_content_under_start_resets_nothing(driver: FakeDriver) -> None:
    history = open_session(driver)
    assert driver.turn(1, [8], start=True, turn=0).code == "INVALID_ARGUMENT"
    assert driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4, max_context=99).code == "INVALID_ARGUMENT"
    assert driver.turn(1, [8], max_tokens=2).token_ids == expected_tokens([*history, 8], 2)


# ---- a turn that runs or waits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_turn_that_is_sent_again_while_it_runs_is_answered_twice_and_whole(
    driver: FakeDriver, num_steps: int
) -> None:
    open_session(driver)
    first, _ = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(num_steps)
    again, _ = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(2)
    third, _ = driver.post(1, [8], turn=1, max_tokens=6)
    driver.run()
    assert first.token_ids == again.token_ids == third.token_ids
    assert first.text == again.text == third.text
    assert [output.position for output in first.outputs] == list(range(8, 14))
    assert again.outputs[0].position == third.outputs[0].position == 8
    assert first.status == again.status == third.status
    assert first.status.context_len == 14
    assert not first.status.replayed


def test_start_that_is_sent_again_while_it_runs_is_answered_twice(driver: FakeDriver) -> None:
    """B2: two first turns of one session in one batch."""
    first, _ = driver.post(1, PROMPT, start=True, turn=0, max_tokens=6)
    driver.steps(2)
    again, _ = driver.post(1, PROMPT, start=True, turn=0, max_tokens=6)
    driver.run()
    assert first.token_ids == again.token_ids == expected_tokens(PROMPT, 6)
    assert driver.runner.num_tokens == 3 + 5


def test_a_turn_that_is_sent_again_while_it_waits_is_answered_twice(driver: FakeDriver) -> None:
    history = open_session(driver)
    driver.post(1, [8], turn=1, max_tokens=6)
    first, _ = driver.post(1, [9], turn=2, max_tokens=3)
    driver.steps(2)
    again, _ = driver.post(1, [9], turn=2, max_tokens=3)
    driver.run()
    history += [8, *expected_tokens([*history, 8], 6), 9]
    assert first.token_ids == again.token_ids == expected_tokens(history, 3)


def test_other_content_does_not_touch_the_turn_that_runs(driver: FakeDriver) -> None:
    """B1: the refusal of a second turn ended the first."""
    history = open_session(driver)
    first, _ = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(1)
    other, _ = driver.post(1, [9], turn=1, max_tokens=6)
    driver.run()
    assert other.code == "INVALID_ARGUMENT"
    assert first.token_ids == expected_tokens([*history, 8], 6)


def test_end_that_is_sent_again_while_it_waits_is_answered_twice(driver: FakeDriver) -> None:
    """B15: double close."""
    open_session(driver)
    driver.post(1, [8], turn=1, max_tokens=6)
    first, _ = driver.post(1, end=True, turn=2)
    again, _ = driver.post(1, end=True, turn=2)
    driver.run()
    assert first.status.finish_reason == again.status.finish_reason == "closed"
    assert driver.turn(1, end=True, turn=2).code == "NOT_FOUND", "the record goes with the session"


def test_no_more_clients_wait_for_one_turn_than_turns_may_wait(driver: FakeDriver) -> None:
    """Otherwise repeating a turn without end would fill the memory."""
    open_session(driver)
    first, _ = driver.post(1, [8], turn=1, max_tokens=6)
    repetitions = [driver.post(1, [8], turn=1, max_tokens=6)[0] for _ in range(5)]
    driver.run()
    assert [repetition.code for repetition in repetitions] == [None, None, *["RESOURCE_EXHAUSTED"] * 3]
    assert {tuple(recorder.token_ids) for recorder in (first, *repetitions[:2])} == {tuple(first.token_ids)}


def test_the_failure_of_a_turn_is_told_to_all_who_sent_it(driver: FakeDriver) -> None:
    open_session(driver)
    recorders = [driver.post(1, [8], turn=1, max_tokens=6)[0] for _ in range(2)]
    driver.runner.error = RuntimeError("out of memory")
    driver.run()
    assert [recorder.code for recorder in recorders] == ["INTERNAL", "INTERNAL"]


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 2**53])
def test_a_gap_is_refused_with_the_number_that_is_expected(driver: FakeDriver, number: int) -> None:
    open_session(driver)
    refused = driver.turn(1, [8], turn=number)
    assert str(refused.error) == f"FAILED_PRECONDITION: turn 1 comes before turn {number} [turn=1]"
    assert driver.turn(1).status.context_len == 7


def test_turns_that_wait_count(driver: FakeDriver) -> None:
    open_session(driver)
    driver.post(1, [8], max_tokens=6)  # turn 1, whether it says so or not
    driver.post(1)  # no turn: it keeps alive
    gap, _ = driver.post(1, [9], turn=3)
    fits, _ = driver.post(1, [9], turn=2, max_tokens=1)
    driver.run()
    assert gap.error is not None
    assert gap.error.details == {"turn": 2}
    assert fits.status.turn == 2


@pytest.mark.parametrize("given", [[], TextInput("")])
def test_keep_alives_take_no_number(driver: FakeDriver, given: Any) -> None:
    open_session(driver)
    assert [driver.turn(1, given).status.turn for _ in range(3)] == [1, 1, 1]
    assert driver.turn(1, [8], turn=1, max_tokens=1).status.turn == 1


@pytest.mark.parametrize(
    "values",
    [{"turn": 1}, {"rewind_to": 7}, {"max_tokens": 1}, {"on_overlap": "interrupt"}, {"role": "user"}],
)
def test_an_empty_turn_that_asks_for_anything_takes_a_number(driver: FakeDriver, values: dict[str, Any]) -> None:
    open_session(driver)
    assert driver.turn(1, **values).status.turn == 1
    assert driver.turn(1, [8], turn=2, max_tokens=1).status.turn == 2


def test_as_many_answers_are_kept_as_turns_can_be_outstanding(driver: FakeDriver) -> None:
    open_session(driver)
    for number in range(1, KEPT + 2):
        driver.turn(1, [8], turn=number, max_tokens=1)
    num_passes = len(driver.runner.batches)
    codes = [driver.turn(1, [8], turn=number, max_tokens=1).code for number in range(1, KEPT + 2)]
    assert codes == ["FAILED_PRECONDITION", None, None, None]
    too_old = driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4)
    assert str(too_old.error) == (
        "FAILED_PRECONDITION: the answer to turn 0 is not kept any more: go on with turn 5 [turn=5]"
    )
    assert len(driver.runner.batches) == num_passes
    assert driver.turn(1).status.context_len == 7 + 8, "START began anew"


def test_a_turn_without_a_number_cannot_be_asked_for_again(driver: FakeDriver) -> None:
    open_session(driver)
    driver.turn(1, [8], max_tokens=1)
    assert driver.turn(1, [8], turn=1, max_tokens=1).code == "FAILED_PRECONDITION"


def test_the_record_survives_rewinds(driver: FakeDriver) -> None:
    open_session(driver)
    first = driver.turn(1, [8], turn=1, max_tokens=6)
    driver.turn(1, [9], turn=2, max_tokens=2, rewind_to=2)
    num_passes = len(driver.runner.batches)
    check_replay(driver, first, driver.turn(1, [8], turn=1, max_tokens=6), num_passes)
    assert driver.turn(1).status.context_len == 5


# ---- turns that do not end well ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "values"), [([VOCAB_SIZE], {}), ([8] * 300, {}), ([8], {"max_tokens": 250}), ([8], {"rewind_to": 99})]
)
def test_the_number_of_a_refused_turn_is_free_again(
    driver: FakeDriver, given: list[int], values: dict[str, Any]
) -> None:
    history = open_session(driver)
    assert driver.turn(1, given, turn=1, **values).error is not None
    answer = driver.turn(1, [9], turn=1, max_tokens=2)
    assert answer.token_ids == expected_tokens([*history, 9], 2)
    assert not answer.status.replayed


def test_the_number_of_a_failed_turn_is_free_again(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    history = open_session(driver)
    driver.runner.error = RuntimeError("out of memory")
    with caplog.at_level(logging.CRITICAL):
        assert driver.turn(1, [8], turn=1, max_tokens=2).code == "INTERNAL"
    assert driver.turn(1, [8], turn=1, max_tokens=2).token_ids == expected_tokens([*history, 8], 2)


def test_a_failed_start_may_be_sent_again(driver: FakeDriver) -> None:
    driver.runner.error = RuntimeError("out of memory")
    assert driver.turn(1, PROMPT, start=True, turn=0, max_tokens=2).code == "INTERNAL"
    again = driver.turn(1, PROMPT, start=True, turn=0, max_tokens=2)
    assert again.token_ids == expected_tokens(PROMPT, 2)


def test_the_number_of_a_cancelled_turn_is_free_again(driver: FakeDriver) -> None:
    history = open_session(driver)
    _, turn = driver.post(1, [8], max_tokens=50)
    driver.steps(2)
    driver.engine.cancel(turn)
    assert driver.turn(1, [9], turn=1, max_tokens=2).token_ids == expected_tokens([*history, 9], 2)


def test_numbered_turns_that_wait_behind_a_failed_one_are_refused_as_a_gap(driver: FakeDriver) -> None:
    """They were meant to follow it; an unnumbered one goes on."""
    history = open_session(driver)
    failed, _ = driver.post(1, [8], turn=1, max_tokens=5)
    waiting = [driver.post(1, [9 + n], turn=2 + n, max_tokens=2)[0] for n in range(2)]
    driver.runner.error = RuntimeError("out of memory")
    driver.run()
    assert failed.code == "INTERNAL"
    assert [recorder.error.details if recorder.error else None for recorder in waiting] == [{"turn": 1}, {"turn": 1}]
    driver.post(1, [8], max_tokens=5)
    unnumbered, _ = driver.post(1, [9], max_tokens=2)
    driver.runner.error = RuntimeError("out of memory")
    driver.run()
    assert unnumbered.token_ids == expected_tokens([*history, 9], 2)


def test_numbered_turns_behind_one_that_left_the_queue_are_refused_as_a_gap(driver: FakeDriver) -> None:
    history = open_session(driver)
    running, _ = driver.post(1, [8], turn=1, max_tokens=5)
    late, _ = driver.post(1, [9], turn=2, max_tokens=5, deadline_ms=10)
    behind, _ = driver.post(1, [10], turn=3, max_tokens=5)
    driver.steps(2)
    driver.clock.now_s += 0.02
    driver.run()
    assert running.token_ids == expected_tokens([*history, 8], 5)
    assert late.code == "DEADLINE_EXCEEDED"
    assert behind.error is not None
    assert behind.error.details == {"turn": 2}


# ---- clients that leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_numbered_turn_whose_client_leaves_stands_still_until_it_is_asked_for(
    driver: FakeDriver, num_steps: int
) -> None:
    """B12: the abandoned partial turn was committed, or lost; here it is done whole, once, and for somebody.

    It generated to its end though its program had been killed.
    """
    history = open_session(driver)
    gone, turn = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(num_steps)
    driver.engine.cancel(turn)
    driver.run()
    assert gone.code == "UNAVAILABLE"  # nobody reads it; but what is never ended is kept for ever by who sends it
    num_passes = len(driver.runner.batches)
    driver.run()
    assert len(driver.runner.batches) == num_passes
    again = driver.turn(1, [8], turn=1, max_tokens=6)
    assert again.token_ids == expected_tokens([*history, 8], 6)
    assert again.status.usage["output_tokens"] == 6
    assert driver.turn(1, [8], turn=1, max_tokens=6).status.replayed


def test_a_turn_that_stands_still_gives_way_to_others_and_goes_on_behind_that(driver: FakeDriver) -> None:
    history = open_session(driver)
    _, turn = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(3)
    driver.engine.cancel(turn)
    driver.run()
    while driver.engine._tiers.reclaim():  # its pages are free for others, as those of a parked session
        pass
    assert driver.turn(1, [9], turn=2, max_tokens=2).token_ids
    again = driver.turn(1, [8], turn=1, max_tokens=6)
    assert again.token_ids == expected_tokens([*history, 8], 6)


def test_a_session_whose_turn_stands_still_expires(driver: FakeDriver) -> None:
    open_session(driver)
    _, turn = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(3)
    driver.engine.cancel(turn)
    driver.run()
    driver.clock.now_s += 1e4
    driver.run()
    assert driver.turn(1, [8], turn=1, max_tokens=6).code == "EXPIRED"


def test_an_interrupt_of_a_turn_that_stands_still_keeps_what_was_said(driver: FakeDriver) -> None:
    history = open_session(driver)
    gone, turn = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(3)
    driver.engine.cancel(turn)
    driver.run()
    answer = driver.turn(1, [9], turn=2, max_tokens=3, on_overlap="interrupt")
    assert answer.token_ids == expected_tokens([*history, 8, *gone.token_ids, 9], 3)


def test_a_client_that_comes_back_in_time_hears_the_whole_answer(driver: FakeDriver) -> None:
    history = open_session(driver)
    gone, turn = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(2)
    driver.engine.cancel(turn)
    driver.steps(1)
    back, _ = driver.post(1, [8], turn=1, max_tokens=6, start=True, resume=True)
    driver.run()
    assert len(gone.token_ids) == 2
    assert back.token_ids == expected_tokens([*history, 8], 6)
    assert not back.status.replayed


def test_a_repetition_whose_client_leaves_takes_the_turn_from_nobody(driver: FakeDriver) -> None:
    history = open_session(driver)
    first, _ = driver.post(1, [8], turn=1, max_tokens=6)
    second, repetition = driver.post(1, [8], turn=1, max_tokens=6)
    driver.steps(2)
    driver.engine.cancel(repetition)
    driver.run()
    assert first.token_ids == expected_tokens([*history, 8], 6)
    assert second.code == "UNAVAILABLE"


def test_a_numbered_turn_that_waits_while_its_client_leaves_is_done_when_it_is_asked_for(driver: FakeDriver) -> None:
    """B13: an abort while the turn was still queued left the session stuck for ever."""
    history = open_session(driver)
    running, _ = driver.post(1, [8], max_tokens=6)
    _, turn = driver.post(1, [9], turn=2, max_tokens=3)
    driver.steps(2)
    driver.engine.cancel(turn)
    driver.run()
    history += [8, *running.token_ids, 9]
    again = driver.turn(1, [9], turn=2, max_tokens=3)
    assert not again.status.replayed
    assert again.token_ids == expected_tokens(history, 3)


def test_an_unnumbered_turn_whose_client_leaves_is_undone_whole(driver: FakeDriver) -> None:
    history = open_session(driver)
    _, turn = driver.post(1, [8], max_tokens=6)
    driver.steps(3)
    driver.engine.cancel(turn)
    assert driver.turn(1, [9], max_tokens=2).token_ids == expected_tokens([*history, 9], 2)


def test_a_turn_whose_client_left_runs_no_longer_than_its_deadline(driver: FakeDriver) -> None:
    open_session(driver)
    _, turn = driver.post(1, [8], turn=1, max_tokens=100, deadline_ms=50)
    driver.steps(3)
    driver.engine.cancel(turn)
    driver.clock.now_s += 0.05
    driver.run()
    again = driver.turn(1, [8], turn=1, max_tokens=100)
    assert again.status.finish_reason == "deadline"
    assert again.status.replayed
    assert len(again.token_ids) == 3


# ---- with interruptions --------------------------------------------------------------------------------------------


def test_what_an_interrupted_turn_said_is_its_record(driver: FakeDriver) -> None:
    open_session(driver)
    first, _ = driver.post(1, [8], turn=1, max_tokens=50)
    waiting, _ = driver.post(1, [9], turn=2, max_tokens=50)
    driver.steps(4)
    driver.turn(1, [10], turn=3, max_tokens=1, on_overlap="interrupt", rewind_to=9)
    num_passes = len(driver.runner.batches)
    check_replay(driver, first, driver.turn(1, [8], turn=1, max_tokens=50), num_passes)
    again = driver.turn(1, [9], turn=2, max_tokens=50)
    assert again.status.finish_reason == waiting.status.finish_reason == "interrupted"
    assert again.status.context_len == 9


def test_an_interrupt_that_is_sent_again_interrupts_nobody(driver: FakeDriver) -> None:
    """It would have stopped its own answer."""
    history = open_session(driver)
    driver.post(1, [8], turn=1, max_tokens=50)
    driver.steps(4)
    first, _ = driver.post(1, [10], turn=2, max_tokens=5, on_overlap="interrupt", rewind_to=7)
    driver.steps(2)
    again, _ = driver.post(1, [10], turn=2, max_tokens=5, on_overlap="interrupt", rewind_to=7)
    driver.run()
    assert first.token_ids == again.token_ids == expected_tokens([*history, 10], 5)
    assert first.status.finish_reason == "length"


def test_a_replayed_answer_counts_as_activity() -> None:
    """Its status promised an idle time that began with the first answer."""
    driver = FakeDriver(idle_timeout_s=10)
    open_session(driver)
    driver.clock.now_s += 9
    assert driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4).status.expires_in_s == 10
    driver.clock.now_s += 9
    driver.run()
    assert driver.turn(1).error is None


def test_who_brings_another_key_gets_no_answer_from_the_record(driver: FakeDriver) -> None:
    open_session(driver, session_key="ours")
    for key in ({}, {"session_key": "theirs"}):
        assert driver.turn(1, PROMPT, start=True, turn=0, max_tokens=4, **key).code == "PERMISSION_DENIED"
    assert open_session(driver, session_key="ours") == [*PROMPT, *expected_tokens(PROMPT, 4)]
