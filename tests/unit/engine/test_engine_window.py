"""Tests of engine: sessions whose window slides."""

from __future__ import annotations

from typing import Any

import pytest

from microturn.errors import InvalidArgument
from microturn.kv.window import Window
from microturn.sessions.inputs import TextInput
from support.fake_runner import FakeDriver, FakeRunner, expected_tokens

# Pages of 4: sinks 4, at least the last 8, and 4 go at a time.
WINDOW = Window(num_sinks=4, length=8, slack=4)
OPTIONS: dict[str, Any] = {"start": True, "overflow": "window", "sink_tokens": 4, "window_tokens": 8}


def new_driver(**kwargs: Any) -> FakeDriver:
    return FakeDriver(max_context=40, window_slack=4, **kwargs)


def talk(driver: FakeDriver, history: list[int], given: list[int], max_tokens: int = 3, **values: Any) -> list[int]:
    """A turn of session 1, whose tokens must be those of the history that its window shows; returns the history."""
    answer = driver.turn(1, given, max_tokens=max_tokens, **values)
    history = [*history, *given]
    assert answer.token_ids == expected_tokens(history, max_tokens, window=WINDOW)
    assert answer.status.context_len == len(history) + max_tokens
    return [*history, *answer.token_ids]


def long_history(driver: FakeDriver, num_turns: int = 20) -> list[int]:
    history = talk(driver, [], [1, 2, 3], **OPTIONS)
    for turn in range(1, num_turns):
        history = talk(driver, history, [turn, turn + 1])
    return history


def test_positions_go_on_counting_and_memory_does_not() -> None:
    driver = new_driver(num_pages=10)
    history = talk(driver, [], [1, 2, 3], **OPTIONS)
    for turn in range(200):
        answer = driver.turn(1, [turn % 97], max_tokens=4)
        history += [turn % 97]
        assert answer.token_ids == expected_tokens(history, 4, window=WINDOW)
        assert answer.outputs[0].position == len(history)
        history += answer.token_ids
        assert answer.status.context_len == len(history)
        assert answer.status.kept_len == len(history) - WINDOW.evicted(len(history))
        assert 40 - 4 * driver.pool.num_free <= WINDOW.max_kept + 4
    assert len(history) > 1000


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 64])
def test_a_turn_may_be_longer_than_the_window(max_batch_tokens: int) -> None:
    driver = new_driver(max_batch_tokens=max_batch_tokens)
    history = talk(driver, [], list(range(10)), **OPTIONS)
    for _ in range(5):
        history = talk(driver, history, list(range(11)), max_tokens=7)


@pytest.mark.parametrize("given", [[], TextInput("")])
def test_a_session_that_is_empty_and_given_nothing_is_told_so_first(given: Any) -> None:
    """As text it was told that its answer was too long for the window (seed 9891 of the simulator)."""
    error = new_driver().turn(1, given, max_tokens=40, **OPTIONS).error
    assert isinstance(error, InvalidArgument)
    assert "there is nothing to generate from" in str(error)


def test_a_turn_that_leaves_no_room_beside_the_window_changes_nothing() -> None:
    driver = new_driver()
    history = long_history(driver)
    num_tokens = driver.runner.num_tokens
    room = 40 - WINDOW.max_kept
    refused = driver.turn(1, [5] * (room - 2), max_tokens=3)
    assert refused.code == "CONTEXT_FULL"
    assert refused.error is not None
    assert refused.error.details == {"room": 2}
    assert driver.runner.num_tokens == num_tokens
    talk(driver, history, [5] * (room - 3), max_tokens=3)


def test_a_cancelled_turn_that_slid_far_is_undone_whole() -> None:
    driver = new_driver()
    history = long_history(driver)
    _, turn = driver.post(1, [7] * 10, max_tokens=6)
    driver.steps(4)
    driver.engine.cancel(turn)
    driver.run()
    before = driver.runner.num_tokens
    history = talk(driver, history, [8], max_tokens=1)
    assert driver.runner.num_tokens - before <= 2, "what was before the cancelled turn was computed again"


def test_a_failed_pass_that_slid_far_is_undone_whole() -> None:
    driver = new_driver(max_batch_tokens=3)
    history = long_history(driver)
    recorder, _ = driver.post(1, [7] * 14, max_tokens=3)
    driver.steps(3)
    driver.runner.error = RuntimeError("the pass breaks")
    driver.run()
    assert recorder.code == "INTERNAL"
    talk(driver, history, [8])


@pytest.mark.parametrize("num_back", range(5))
def test_a_rewind_within_the_slack_costs_no_more_than_its_own_tokens(num_back: int) -> None:
    driver = new_driver()
    history = long_history(driver)
    left = len(history) - num_back
    before = driver.runner.num_tokens
    history = talk(driver, history[:left], [9, 9], max_tokens=2, rewind_to=left)
    assert driver.runner.num_tokens - before <= 2 + 2


def test_a_rewind_into_what_was_evicted_is_refused_and_told_how_far_it_may_go() -> None:
    driver = new_driver()
    history = long_history(driver)
    refused = driver.turn(1, [9], rewind_to=20)
    assert refused.code == "FAILED_PRECONDITION"
    assert refused.error is not None
    least = refused.error.details["position"]
    assert driver.turn(1, [9], rewind_to=least - 1).code == "FAILED_PRECONDITION"
    talk(driver, history[:least], [9], rewind_to=least)


def test_an_interrupt_cuts_at_what_was_heard() -> None:
    driver = new_driver()
    history = long_history(driver)
    answer, _ = driver.post(1, [3], max_tokens=9)
    driver.steps(5)
    heard = [*history, 3, *answer.token_ids][: len(history) + 3]
    talk(driver, heard, [4, 5], on_overlap="interrupt", rewind_to=len(heard))
    assert answer.status.finish_reason == "interrupted"


def test_a_branch_has_the_window_of_its_parent() -> None:
    driver = new_driver()
    history = long_history(driver)
    before = driver.runner.num_tokens
    branch = driver.turn(2, [6], start=True, fork_of="1", max_tokens=5)
    assert branch.token_ids == expected_tokens([*history, 6], 5, window=WINDOW)
    assert driver.runner.num_tokens - before <= 4 + 1 + 4
    history = talk(driver, history, [7], max_tokens=5)
    for values in ({"overflow": "window"}, {"sink_tokens": 0}, {"window_tokens": 8}):
        assert driver.turn(3, [6], start=True, fork_of="1", **values).code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_a_cut_into_a_page_that_is_shared_computes_all_again_that_saw_what_is_gone(length: int) -> None:
    """The page goes whole, and the tokens before the cut that stood in it see more than is left."""
    driver, window = new_driver(), Window(num_sinks=4, length=length, slack=4)
    options = {**OPTIONS, "window_tokens": length}
    history = [3, 1, 4, 1, 5, 9, 2, 6]
    history += driver.turn(1, history, max_tokens=3, **options).token_ids
    history += [9, *driver.turn(1, [9], max_tokens=9).token_ids]
    history += [7, *driver.turn(2, [7], start=True, fork_of="1", max_tokens=6).token_ids]
    refused = driver.turn(2, [8], max_tokens=3, rewind_to=5)
    least = refused.error.details["position"]
    for cut_at in range(least, least + 4):
        answer = driver.turn(3 + cut_at, [8], start=True, fork_of="2", max_tokens=3, rewind_to=cut_at)
        assert answer.token_ids == expected_tokens([*history[:cut_at], 8], 3, window=window)
    for cut_at in range(least + 3, least - 1, -1):
        answer = driver.turn(2, [8], max_tokens=3, rewind_to=cut_at)
        assert answer.token_ids == expected_tokens([*history[:cut_at], 8], 3, window=window)
        history = [*history[:cut_at], 8, *answer.token_ids]


def test_preempted_sessions_walk_through_their_history_again() -> None:
    """Three sessions that keep five pages each, on a pool for one and a half."""
    driver = new_driver(num_pages=10)
    histories = {n: [n] for n in range(3)}
    for n in histories:
        driver.turn(n, [n], max_tokens=0, **OPTIONS)
    for turn in range(20):
        answers = {n: driver.post(n, [turn, n], max_tokens=3)[0] for n in histories}
        driver.run()
        for n, answer in answers.items():
            histories[n] += [turn, n]
            assert answer.token_ids == expected_tokens(histories[n], 3, window=WINDOW)
            histories[n] += answer.token_ids


def test_only_what_nobody_has_evicted_yet_is_shared() -> None:
    """KV behind the first eviction has seen less than that of a session without a window."""
    driver = new_driver(share_prefixes=True)
    prompt = list(range(18))
    plain = driver.turn(5, prompt, start=True, max_tokens=1)
    assert plain.token_ids == expected_tokens(prompt, 1)
    windowed = driver.turn(6, prompt, max_tokens=1, **OPTIONS)
    assert windowed.token_ids == expected_tokens(prompt, 1, window=WINDOW)
    assert windowed.status.usage["cached_tokens"] == WINDOW.max_visible // 4 * 4
    again = driver.turn(7, prompt, start=True, max_tokens=1)
    assert again.token_ids == expected_tokens(prompt, 1)
    assert again.status.usage["cached_tokens"] == 16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sink_tokens": 4}, "come with overflow=window"),
        ({"overflow": "error", "window_tokens": 4}, "come with overflow=window"),
        ({"overflow": "window", "window_tokens": 40}, "leave no room for a turn: max_context is 40"),
        ({"overflow": "window", "max_context": 12}, "leave no room for a turn: max_context is 12"),
    ],
)
def test_windows_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    refused = new_driver().turn(1, [1], start=True, **values)
    assert refused.code == "INVALID_ARGUMENT"
    assert message in str(refused.error)


def test_a_model_whose_positions_are_not_relative_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "no_window_reason", "its positions are learned")
    driver = new_driver()
    refused = driver.turn(1, [1], **OPTIONS)
    assert refused.code == "INVALID_ARGUMENT"
    assert "its positions are learned" in str(refused.error)
    assert driver.turn(1, [1], start=True, max_tokens=1).error is None
