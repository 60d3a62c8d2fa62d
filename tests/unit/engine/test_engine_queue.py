"""Tests of engine: turns that overlap in one session, and the options that START sets for all of them."""

from __future__ import annotations

import pytest

from support.driver import Recorder
from support.fake_runner import FakeDriver, expected_tokens


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=256)


# ---- order ---------------------------------------------------------------------------------------------------------


def test_turns_that_overlap_are_answered_in_the_order_in_which_they_came(driver: FakeDriver) -> None:
    """B1: a second turn overwrote the first one's tokens and freed its KV."""
    answers = [driver.post(1, [5], start=True, max_tokens=4)[0]]
    for token_id in (6, 7, 8):
        driver.engine.step()
        answers.append(driver.post(1, [token_id], max_tokens=3)[0])
    driver.run()
    history: list[int] = []
    for number, (token_id, answer) in enumerate(zip((5, 6, 7, 8), answers, strict=True)):
        history.append(token_id)
        assert answer.token_ids == expected_tokens(history, 4 if number == 0 else 3)
        history += answer.token_ids
        assert answer.status.turn == number
        assert answer.status.context_len == len(history)


def test_turns_posted_together_are_taken_one_by_one(driver: FakeDriver) -> None:
    answers = [driver.post(1, [n], start=n == 1, max_tokens=2)[0] for n in (1, 2, 3)]
    driver.run()
    assert [answer.status.context_len for answer in answers] == [3, 6, 9]


def test_appends_and_keep_alives_wait_their_turn_too(driver: FakeDriver) -> None:
    answer, _ = driver.post(1, [5], start=True, max_tokens=4)
    appended, _ = driver.post(1, [6], max_tokens=0)
    kept, _ = driver.post(1)
    driver.engine.step()
    assert not appended.is_done
    assert not kept.is_done
    driver.run()
    assert answer.status.context_len == 5
    assert appended.status.context_len == kept.status.context_len == 6


def test_a_turn_too_many_is_refused_and_does_not_end_the_one_that_runs() -> None:
    """B1: rejecting a second turn cleared the session's busy mark, so a third was accepted and broke the first."""
    driver = FakeDriver(max_queued_turns=2)
    running, _ = driver.post(1, [5], start=True, max_tokens=6)
    driver.engine.step()
    waiting = [driver.post(1, [6 + n], max_tokens=2)[0] for n in range(2)]
    refused = [driver.post(1, [9], max_tokens=2)[0] for _ in range(3)]
    driver.engine.step()
    for recorder in refused:
        assert recorder.error is not None
        assert str(recorder.error) == (
            "RESOURCE_EXHAUSTED: 2 turns wait in this session already: wait for an answer [retry_after_ms=200]"
        )
    driver.run()
    history = [5, *expected_tokens([5], 6)]
    assert running.token_ids == history[1:]
    for n, recorder in enumerate(waiting):
        history.append(6 + n)
        assert recorder.token_ids == expected_tokens(history, 2)
        history += recorder.token_ids
    assert driver.turn(1).status.context_len == len(history)


def test_a_long_queue_of_turns_that_compute_nothing_is_worked_off() -> None:
    """Each finished turn took the next one by calling itself: a queue of some hundred ended the engine's thread."""
    driver = FakeDriver(max_queued_turns=1000)
    driver.post(1, [5], start=True, max_tokens=2)
    kept = [driver.post(1)[0] for _ in range(1000)]
    driver.run()
    assert all(recorder.status.context_len == 3 for recorder in kept)


def test_a_long_queue_of_turns_that_are_refused_is_worked_off() -> None:
    driver = FakeDriver(max_queued_turns=1000, max_context=16)
    driver.post(1, [5], start=True, max_tokens=2)
    refused = [driver.post(1, [6] * 20)[0] for _ in range(1000)]
    driver.run()
    assert all(recorder.error is not None and recorder.error.code == "CONTEXT_FULL" for recorder in refused)


def test_what_depends_on_the_context_is_checked_when_the_turn_is_taken() -> None:
    driver = FakeDriver(max_context=12)
    running, _ = driver.post(1, [5], start=True, max_tokens=7)
    too_long, _ = driver.post(1, [6] * 3, max_tokens=2)
    fits, _ = driver.post(1, [6] * 2, max_tokens=2)
    driver.run()
    assert running.status.context_len == 8
    assert too_long.error is not None
    assert too_long.error.code == "CONTEXT_FULL"
    assert fits.status.context_len == 12


def test_what_a_turn_says_is_checked_when_it_arrives(driver: FakeDriver) -> None:
    running, _ = driver.post(1, [5], start=True, max_tokens=8)
    refused, _ = driver.post(1, [1000])
    driver.engine.step()
    assert refused.error is not None
    assert not running.is_done


def test_the_clock_tells_how_long_a_turn_waited_and_ran(driver: FakeDriver) -> None:
    driver.post(1, [5], start=True, max_tokens=2)
    answer, _ = driver.post(1, [6], max_tokens=2)
    for _ in range(2):
        driver.clock.now_s += 0.25
        driver.engine.step()  # the first turn's two tokens
    driver.clock.now_s += 0.125
    driver.engine.step()
    driver.clock.now_s += 0.0625
    driver.run()
    timing = answer.status.timing_ms
    assert timing["queue"] == pytest.approx(500)
    assert timing["prefill"] == pytest.approx(125)
    assert timing["decode"] == pytest.approx(62.5)
    assert timing["total"] == pytest.approx(687.5)


# ---- what START sets -----------------------------------------------------------------------------------------------


def num_tokens(recorder: Recorder) -> int:
    return len(recorder.token_ids)


def test_what_start_sets_becomes_the_sessions_default(driver: FakeDriver) -> None:
    assert num_tokens(driver.turn(1, [5], start=True, max_tokens=3, logprobs=True, return_appended_ids=True)) == 3
    answer = driver.turn(1, [6])
    assert num_tokens(answer) == 3
    assert all(len(output.logprobs) == 1 for output in answer.outputs)
    assert answer.outputs[-1].appended_ids == (6,)


def test_a_turns_own_options_count_for_that_turn_only(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=3)
    assert num_tokens(driver.turn(1, [6], max_tokens=5, logprobs=True)) == 5
    answer = driver.turn(1, [7])
    assert num_tokens(answer) == 3
    assert answer.outputs[0].logprobs == ()


def test_an_empty_turn_generates_only_when_it_says_so_itself(driver: FakeDriver) -> None:
    """START's `max_tokens` made every keep-alive generate an answer to nothing."""
    driver.turn(1, [5], start=True, max_tokens=3)
    assert num_tokens(driver.turn(1)) == 0
    assert num_tokens(driver.turn(1, max_tokens=2)) == 2
    assert driver.turn(1, end=True).status.finish_reason == "closed"


def test_a_seed_is_drawn_at_start_and_told(driver: FakeDriver) -> None:
    seeds = [driver.turn(number, [5], start=True, max_tokens=1).status.seed for number in range(1, 4)]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert driver.turn(1, [6], max_tokens=1).status.seed == seeds[0]


def test_a_seed_given_at_start_is_the_sessions(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=1, seed=0)
    assert driver.turn(1, [6], max_tokens=1).status.seed == 0
    assert driver.turn(1, [6], max_tokens=1, seed=4).status.seed == 4
    assert driver.turn(1, [6], max_tokens=1).status.seed == 0


def test_another_session_has_its_own_defaults(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=3)
    driver.turn(2, [5], start=True)
    assert num_tokens(driver.turn(2, [6])) == 16
    driver.turn(1, [5], start=True)
    assert num_tokens(driver.turn(1, [6])) == 16, "a session of the same id begins anew"
