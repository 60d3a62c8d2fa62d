"""Tests of engine: contexts that are cut back. What comes next is as if nothing had ever stood behind the cut."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from microturn.sessions.inputs import EmbedInput
from support.fake_runner import HIDDEN_SIZE, FakeDriver, Item, expected_tokens

SAMPLING = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 7}
EMBEDS = torch.arange(20.0).reshape(5, HIDDEN_SIZE)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(max_context=256, max_batch_tokens=16)


def talk(driver: FakeDriver, session_id: int = 1, **values: Any) -> list[Item]:
    """A session of three turns, one of them embeddings; its history."""
    history: list[Item] = [5, 6, 7]
    history += driver.turn(session_id, [5, 6, 7], start=True, max_tokens=4, **values).token_ids
    history += [*EMBEDS, *driver.turn(session_id, EmbedInput(EMBEDS), max_tokens=0, **values).token_ids]
    history += [8, 9, *driver.turn(session_id, [8, 9], max_tokens=4, **values).token_ids]
    return history


LEN = 3 + 4 + 5 + 2 + 4


@pytest.mark.parametrize("rewind_to", range(LEN + 1))
def test_a_parked_session_is_cut_at_any_position(driver: FakeDriver, rewind_to: int) -> None:
    """After a sliding-window eviction a position was the window's length instead of the true one: here it is true."""
    history = talk(driver)
    assert len(history) == LEN
    num_computed = driver.runner.num_tokens
    answer = driver.turn(1, [10, 11], max_tokens=4, rewind_to=rewind_to)
    kept = history[:rewind_to]
    assert answer.token_ids == expected_tokens([*kept, 10, 11], 4)
    assert answer.outputs[0].position == rewind_to + 2
    assert answer.status.context_len == answer.status.kept_len == rewind_to + 6
    assert answer.status.turn == 3, "a rewind takes no number back"
    assert answer.status.usage["cached_tokens"] == max(0, rewind_to - 1), "KV before the cut was lost"
    assert driver.runner.num_tokens - num_computed == min(1, rewind_to) + 2 + 3
    again = driver.turn(1, [12], max_tokens=2)
    assert again.token_ids == expected_tokens([*kept, 10, 11, *answer.token_ids, 12], 2)


@pytest.mark.parametrize("rewind_to", range(LEN + 1))
def test_an_empty_turn_cuts_and_computes_nothing(driver: FakeDriver, rewind_to: int) -> None:
    history = talk(driver)
    num_passes = len(driver.runner.batches)
    cut = driver.turn(1, rewind_to=rewind_to)
    assert cut.status.finish_reason == "append"
    assert cut.status.context_len == rewind_to
    assert len(driver.runner.batches) == num_passes
    assert driver.turn(1, [10], max_tokens=3).token_ids == expected_tokens([*history[:rewind_to], 10], 3)


@pytest.mark.parametrize("rewind_to", range(1, LEN + 1))
def test_an_answer_is_taken_up_again_where_it_was_cut(driver: FakeDriver, rewind_to: int) -> None:
    """A mere empty generation behind the cut: greedy, it says once more what it had said there."""
    kept = talk(driver)[:rewind_to]
    answer = driver.turn(1, max_tokens=5, rewind_to=rewind_to)
    assert answer.token_ids == expected_tokens(kept, 5)


@pytest.mark.parametrize("rewind_to", [LEN + 1, LEN + 100, 2**53])
def test_there_is_no_cut_behind_the_end(driver: FakeDriver, rewind_to: int) -> None:
    history = talk(driver)
    num_passes = len(driver.runner.batches)
    refused = driver.turn(1, [10], rewind_to=rewind_to)
    assert str(refused.error) == (
        f"FAILED_PRECONDITION: rewind_to={rewind_to} is behind the end of the context [position={LEN}]"
    )
    assert len(driver.runner.batches) == num_passes
    assert driver.turn(1, [10], max_tokens=3).token_ids == expected_tokens([*history, 10], 3)


def test_start_has_nothing_to_cut(driver: FakeDriver) -> None:
    assert driver.turn(1, [5], start=True, rewind_to=1).code == "FAILED_PRECONDITION"
    assert driver.turn(1).code == "NOT_FOUND"
    assert driver.turn(1, [5], start=True, rewind_to=0, max_tokens=2).token_ids == expected_tokens([5], 2)


def test_a_rewind_holds_for_its_turn_alone(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, rewind_to=0, max_tokens=2)
    assert driver.turn(1, [6], max_tokens=2).status.context_len == 6


def test_a_rewind_that_waits_is_checked_when_its_time_has_come(driver: FakeDriver) -> None:
    """At that time the context is longer, or shorter, than when the turn was sent."""
    answer, _ = driver.post(1, [5], start=True, max_tokens=9)
    driver.steps(2)
    later, _ = driver.post(1, [6], max_tokens=2, rewind_to=8)
    too_far, _ = driver.post(1, [7], max_tokens=2, rewind_to=12)
    driver.run()
    assert answer.status.context_len == 10
    assert later.token_ids == expected_tokens([5, *answer.token_ids[:7], 6], 2)
    assert too_far.error is not None
    assert too_far.error.details == {"position": 11}


def test_a_rewind_makes_room(driver: FakeDriver) -> None:
    driver.turn(1, [5] * 240, start=True, max_tokens=16)
    assert driver.turn(1, [6] * 20, max_tokens=0).code == "CONTEXT_FULL"
    assert driver.turn(1, [6] * 20, max_tokens=0, rewind_to=236).status.context_len == 256


def test_pages_behind_the_cut_are_free_at_once(driver: FakeDriver) -> None:
    """B17-B20: tail pages leaked, lengths were not page-aligned."""
    driver.turn(1, [5] * 100, start=True, max_tokens=0)
    num_pages = [(driver.turn(1, rewind_to=at), 128 - driver.pool.num_free)[1] for at in (100, 50, 49, 5, 2, 1, 0)]
    assert num_pages == [25, 13, 12, 1, 1, 0, 0]


def test_a_session_that_lost_its_pages_is_cut_too() -> None:
    driver = FakeDriver(num_pages=8, max_context=32)
    history = [5] * 20
    driver.turn(1, history, start=True, max_tokens=0)
    driver.turn(2, [9] * 28, start=True, end=True, max_tokens=4)
    answer = driver.turn(1, [6], max_tokens=3, rewind_to=10)
    assert answer.status.usage["cached_tokens"] == 0
    assert answer.token_ids == expected_tokens([*history[:10], 6], 3)


# ---- undone --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewind_to", range(LEN + 1))
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_cancelled_rewind_gives_back_what_it_cut(driver: FakeDriver, rewind_to: int, num_steps: int) -> None:
    """B16: check the exact context length after an abort; B12: a clean, exact roll-back."""
    history = talk(driver)
    cancelled, turn = driver.post(1, [10] * 20, max_tokens=30, rewind_to=rewind_to)
    driver.steps(num_steps)
    driver.engine.cancel(turn)
    driver.run()
    assert cancelled.status.finish_reason == "cancelled"
    assert cancelled.status.context_len == LEN
    answer = driver.turn(1, [12], max_tokens=3)
    assert answer.token_ids == expected_tokens([*history, 12], 3)
    assert answer.status.turn == 3


def test_a_rewind_whose_pass_fails_gives_back_what_it_cut(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    history = talk(driver)
    driver.runner.error = RuntimeError("out of memory")
    with caplog.at_level(logging.CRITICAL):
        assert driver.turn(1, [10], max_tokens=3, rewind_to=9).code == "INTERNAL"
    assert driver.turn(1, [12], max_tokens=3).token_ids == expected_tokens([*history, 12], 3)


@pytest.mark.parametrize(
    ("given", "values"), [([10] * 248, {}), ([10], {"max_tokens": 247}), ([], {"max_tokens": 1, "rewind_to": 0})]
)
def test_a_refused_rewind_cuts_nothing(driver: FakeDriver, given: list[int], values: dict[str, Any]) -> None:
    history = talk(driver)
    refused = driver.turn(1, given, **{"rewind_to": 9, **values})
    assert refused.code in ("CONTEXT_FULL", "INVALID_ARGUMENT")
    answer = driver.turn(1, [12], max_tokens=3)
    assert answer.token_ids == expected_tokens([*history, 12], 3)
    assert answer.status.usage["cached_tokens"] == LEN - 1


def test_one_rewind_after_another_is_undone_step_by_step(driver: FakeDriver) -> None:
    history = talk(driver)
    driver.turn(1, [10, 11], max_tokens=0, rewind_to=12)
    for rewind_to in (13, 3, 0):
        _, turn = driver.post(1, [13], max_tokens=9, rewind_to=rewind_to)
        driver.steps(2)
        driver.engine.cancel(turn)
    driver.run()
    assert driver.turn(1, [12], max_tokens=3).token_ids == expected_tokens([*history[:12], 10, 11, 12], 3)


# ---- what is sampled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewind_to", range(LEN + 1))
def test_sampling_is_that_of_a_session_in_which_the_dropped_tokens_had_never_been(
    driver: FakeDriver, rewind_to: int
) -> None:
    """Seeds count by absolute position, penalties by what is in the context: neither remembers what was cut off."""
    kept = talk(driver, **SAMPLING)[:rewind_to]
    answer = driver.turn(1, [10, 11], max_tokens=8, rewind_to=rewind_to, **SAMPLING)
    driver.turn(2, start=True, **SAMPLING)
    for item in kept:
        given = [item] if isinstance(item, int) else EmbedInput(item[None])
        driver.turn(2, given, max_tokens=0)
    fresh = driver.turn(2, [10, 11], max_tokens=8, **SAMPLING)
    assert answer.token_ids == fresh.token_ids
    assert len(set(answer.token_ids)) > 1


# ---- shared pages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewind_to", range(30))
def test_pages_that_others_read_are_never_written(rewind_to: int) -> None:
    """Two sessions and the cache share a prefix; one is cut within it and says something else there."""
    driver = FakeDriver(max_context=128)
    prompt = list(range(40, 66))
    driver.turn(0, prompt, start=True, end=True, max_tokens=4)
    histories: dict[int, list[int]] = {}
    for session_id in (1, 2):
        opened = driver.turn(session_id, [*prompt, session_id], start=True, max_tokens=4)
        assert opened.status.usage["cached_tokens"] == 24
        histories[session_id] = [*prompt, session_id, *opened.token_ids]
    answer, _ = driver.post(1, [90, 91, 92], max_tokens=5, rewind_to=rewind_to)
    other, _ = driver.post(2, [3], max_tokens=5)
    driver.run()
    assert answer.token_ids == expected_tokens([*histories[1][:rewind_to], 90, 91, 92], 5)
    assert other.token_ids == expected_tokens([*histories[2], 3], 5)
    third = driver.turn(3, [*prompt, 3], start=True, max_tokens=3)
    assert third.status.usage["cached_tokens"] == 24
    assert third.token_ids == expected_tokens([*prompt, 3], 3)
    for session_id in (1, 2, 3):
        driver.turn(session_id, end=True)
    driver.engine._prefixes.clear()
    assert driver.pool.num_free == 128


def test_a_rewind_within_a_shared_page_computes_that_page_again_and_no_more() -> None:
    driver = FakeDriver(max_context=128)
    prompt = [5] * 26
    driver.turn(0, prompt, start=True, max_tokens=0)
    driver.turn(1, prompt, start=True, max_tokens=0)
    cut = {at: driver.turn(1, [6], max_tokens=0, rewind_to=at).status.usage["cached_tokens"] for at in (25, 16, 11)}
    assert cut == {25: 24, 16: 12, 11: 8}
