"""Tests of engine: turns that nobody waits for any more. What they did is undone, and nothing else."""

from __future__ import annotations

import pytest
import torch

from microturn.sessions.inputs import EmbedInput
from support.fake_runner import HIDDEN_SIZE, FakeDriver, expected_tokens


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=256, max_batch_tokens=32)


def steps(driver: FakeDriver, num_steps: int) -> None:
    for _ in range(num_steps):
        driver.engine.step()
        driver.engine.check_integrity()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("prompt_len", [3, 70])
def test_a_cancelled_first_turn_leaves_an_empty_session(driver: FakeDriver, num_steps: int, prompt_len: int) -> None:
    """B16: abort of the first turn, before it starts, while its prompt is computed or while it generates."""
    answer, turn = driver.post(1, [5] * prompt_len, start=True, max_tokens=20)
    steps(driver, num_steps)
    driver.engine.cancel(turn)
    driver.run()
    assert answer.status.finish_reason == "cancelled"
    assert answer.status.context_len == 0
    assert driver.pool.num_free == 128
    assert driver.turn(1, [6, 7], max_tokens=3).token_ids == expected_tokens([6, 7], 3)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("given_len", [0, 1, 3, 70])
def test_a_cancelled_later_turn_leaves_the_context_as_it_was(
    driver: FakeDriver, num_steps: int, given_len: int
) -> None:
    """B16: abort of the n-th turn; the next one must see the exact context length from before."""
    history = [5, 6, 7]
    history += driver.turn(1, history, start=True, max_tokens=4).token_ids
    history.append(8)
    driver.turn(1, [8], max_tokens=0)
    answer, turn = driver.post(1, [9] * given_len, max_tokens=20)
    steps(driver, num_steps)
    driver.engine.cancel(turn)
    driver.run()
    assert answer.status.finish_reason == "cancelled"
    assert answer.status.context_len == len(history)
    later = driver.turn(1, [10], max_tokens=3)
    assert later.token_ids == expected_tokens([*history, 10], 3)
    assert later.status.context_len == len(history) + 4


def test_a_cancelled_turn_keeps_the_sessions_kv(driver: FakeDriver) -> None:
    """Cancelling a turn dropped the whole session's KV, so the next turn computed everything again."""
    history = [5] * 100
    history += driver.turn(1, history, start=True, max_tokens=4).token_ids
    _, turn = driver.post(1, [9] * 10, max_tokens=20)
    steps(driver, 3)
    driver.engine.cancel(turn)
    later = driver.turn(1, [10], max_tokens=1)
    assert later.status.usage["computed_tokens"] == 2
    assert later.token_ids == expected_tokens([*history, 10], 1)


def test_what_a_cancelled_turn_took_is_free_again(driver: FakeDriver) -> None:
    """B5, B17: pages of an aborted turn were never freed."""
    driver.turn(1, [5] * 10, start=True, max_tokens=0)
    num_free = driver.pool.num_free
    _, turn = driver.post(1, [9] * 100, max_tokens=20)
    steps(driver, 6)
    assert driver.pool.num_free < num_free - 20
    driver.engine.cancel(turn)
    driver.run()
    assert driver.pool.num_free == num_free


def test_cancelled_embeddings_are_gone(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=0)
    _, turn = driver.post(1, EmbedInput(torch.ones(6, HIDDEN_SIZE)), max_tokens=20)
    steps(driver, 3)
    driver.engine.cancel(turn)
    assert driver.turn(1, [6] * 8, max_tokens=3).token_ids == expected_tokens([5] + [6] * 8, 3)


def test_a_turn_cancelled_while_it_waits_leaves_nothing_behind(driver: FakeDriver) -> None:
    """B13: an abort while the turn was still queued left the session stuck for ever."""
    running, _ = driver.post(1, [5], start=True, max_tokens=8)
    waiting, turn = driver.post(1, [6], max_tokens=8)
    last, _ = driver.post(1, [7], max_tokens=2)
    steps(driver, 2)
    driver.engine.cancel(turn)
    steps(driver, 1)
    assert waiting.status.finish_reason == "cancelled"
    assert waiting.token_ids == []
    assert not running.is_done
    driver.run()
    history = [5, *expected_tokens([5], 8), 7]
    assert running.token_ids == history[1:-1]
    assert last.token_ids == expected_tokens(history, 2)
    assert driver.turn(1, end=True).status.finish_reason == "closed"


def test_the_turn_that_waits_goes_on_when_the_running_one_is_cancelled(driver: FakeDriver) -> None:
    """B12: the client leaves after the first chunk and sends its next turn at once: all is as before."""
    history = [5, *driver.turn(1, [5], start=True, max_tokens=3).token_ids]
    cancelled, turn = driver.post(1, [6], max_tokens=50)
    steps(driver, 1)
    assert len(cancelled.token_ids) == 1
    driver.engine.cancel(turn)
    answer, _ = driver.post(1, [7], max_tokens=3)
    driver.run()
    assert cancelled.status.context_len == len(history)
    assert answer.token_ids == expected_tokens([*history, 7], 3)


def test_a_close_that_waits_behind_a_cancelled_turn_comes(driver: FakeDriver) -> None:
    """B4: aborted while another turn was queued, the close waited for ever."""
    _, turn = driver.post(1, [5], start=True, max_tokens=50)
    closing, _ = driver.post(1, end=True)
    steps(driver, 2)
    driver.engine.cancel(turn)
    driver.run()
    assert closing.status.finish_reason == "closed"
    assert driver.pool.num_free == 128


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_cancelled_end_is_undone_whole_and_the_session_lives(driver: FakeDriver, num_steps: int) -> None:
    """Its stream had broken, so it was undone, as the contract says; but the session was closed with it."""
    history = [5, *driver.turn(1, [5], start=True, max_tokens=2).token_ids]
    _, turn = driver.post(1, [6], end=True, max_tokens=50)
    steps(driver, num_steps)
    driver.engine.cancel(turn)
    driver.run()
    # Triton has ended the sequence all the same.
    again = driver.turn(1, [7], start=True, resume=True, max_tokens=3)
    assert again.token_ids == expected_tokens([*history, 7], 3)


def test_a_cancelled_end_in_the_queue_is_undone_too(driver: FakeDriver) -> None:
    first, _ = driver.post(1, [5], start=True, max_tokens=5)
    _, turn = driver.post(1, [6], end=True)
    steps(driver, 2)
    driver.engine.cancel(turn)
    driver.run()
    assert driver.turn(1, [7], max_tokens=3).token_ids == expected_tokens([5, *first.token_ids, 7], 3)


def test_a_numbered_end_closes_though_its_stream_breaks(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    _, turn = driver.post(1, [6], end=True, max_tokens=5, turn=1)
    steps(driver, 2)
    driver.engine.cancel(turn)
    driver.run()
    assert driver.turn(1, [7]).code == "NOT_FOUND"


def test_a_session_of_one_turn_goes_with_it(driver: FakeDriver) -> None:
    _, turn = driver.post(1, [5], start=True, end=True, max_tokens=50)
    steps(driver, 2)
    driver.engine.cancel(turn)
    driver.run()
    assert driver.turn(1, [7]).code == "NOT_FOUND"
    assert driver.pool.num_free == 128


def test_cancelling_twice_or_too_late_does_nothing(driver: FakeDriver) -> None:
    answer, turn = driver.post(1, [5], start=True, max_tokens=2)
    driver.run()
    for _ in range(2):
        driver.engine.cancel(turn)
        driver.run()
    assert answer.status.finish_reason == "length"
    other, other_turn = driver.post(1, [6], max_tokens=9)
    steps(driver, 2)
    for _ in range(2):
        driver.engine.cancel(other_turn)
        driver.engine.cancel(turn)
    driver.run()
    assert other.status.finish_reason == "cancelled"
    assert driver.turn(1).status.context_len == 3


def test_cancelling_a_turn_of_a_session_that_is_gone_does_nothing(driver: FakeDriver) -> None:
    _, turn = driver.post(1, [5], start=True, end=True, max_tokens=2)
    driver.run()
    driver.engine.cancel(turn)
    driver.run()
    driver.turn(1, [6], start=True, max_tokens=2)
    driver.engine.cancel(turn)
    assert driver.turn(1).status.context_len == 3


def test_only_the_turn_itself_is_cancelled_not_one_of_a_like_id(driver: FakeDriver) -> None:
    """An abort matched ids by their beginning: aborting 'a1' also aborted 'a10'."""
    ids = ["a1", "a10", "a", "a11"]
    posted = {session_id: driver.post(session_id, [5], start=True, max_tokens=6) for session_id in ids}
    steps(driver, 2)
    driver.engine.cancel(posted["a1"][1])
    driver.run()
    reasons = {session_id: answer.status.finish_reason for session_id, (answer, _) in posted.items()}
    assert reasons == {"a1": "cancelled", "a10": "length", "a": "length", "a11": "length"}


def test_a_cancelled_turn_does_not_look_like_a_finished_one(driver: FakeDriver) -> None:
    finished = driver.turn(1, [5], start=True, max_tokens=3)
    cancelled, turn = driver.post(1, [6], max_tokens=3)
    steps(driver, 2)
    driver.engine.cancel(turn)
    driver.run()
    assert finished.status.finish_reason == "length"
    assert cancelled.status.finish_reason == "cancelled"
    assert cancelled.status.context_len == finished.status.context_len


def test_others_do_not_notice(driver: FakeDriver) -> None:
    answers = {n: driver.post(n, [n], start=True, max_tokens=10) for n in range(1, 6)}
    steps(driver, 4)
    driver.engine.cancel(answers[3][1])
    driver.run()
    for n in (1, 2, 4, 5):
        assert answers[n][0].token_ids == expected_tokens([n], 10)
