"""Tests of engine: a pool that cannot hold all sessions. Everybody is answered, and with the right tokens."""

from __future__ import annotations

import random

import pytest

from microturn.kv.pool import PagePool
from support.driver import Recorder
from support.fake_runner import FakeDriver, expected_tokens


def check_answer(history: list[int], given: list[int], answer: Recorder, num_tokens: int) -> None:
    """Checks a turn's tokens and adds it to the history."""
    history += given
    assert answer.token_ids == expected_tokens(history, num_tokens)
    history += answer.token_ids
    assert answer.status.context_len == len(history)


@pytest.mark.parametrize("num_pages", [16, 24, 40])
@pytest.mark.parametrize("seed", range(3))
def test_eight_sessions_in_a_pool_for_two_are_all_answered_right(num_pages: int, seed: int) -> None:
    """Oracle 2 with a runner whose tokens tell every mix-up of pages: preemption and reclaiming change no token."""
    driver = FakeDriver(num_pages=num_pages, max_context=64, max_batch_tokens=12)
    rng = random.Random(seed)
    histories: dict[int, list[int]] = {session_id: [] for session_id in range(8)}
    for number in range(4):
        posted = {}
        for session_id in rng.sample(range(8), 8):
            given = [rng.randrange(97) for _ in range(rng.randint(1, 9))]
            num_tokens = rng.randint(1, 5)
            answer, _ = driver.post(session_id, given, start=number == 0, max_tokens=num_tokens)
            posted[session_id] = (given, answer, num_tokens)
            for _ in range(rng.randint(0, 2)):
                driver.engine.step()
                driver.engine.check_integrity()
        driver.run()
        for session_id, (given, answer, num_tokens) in posted.items():
            check_answer(histories[session_id], given, answer, num_tokens)
    for session_id in range(8):
        driver.turn(session_id, end=True)
    assert driver.pool.num_free == num_pages, "B17-B20: pages were leaked"


def test_idle_sessions_make_room_for_those_that_run() -> None:
    """B3: idle sessions held every row, so that of 4 second turns none came back."""
    driver = FakeDriver(num_pages=8, max_context=32)
    histories = {}
    for session_id in range(4):
        histories[session_id] = [session_id, *[5] * 19]
        answer = driver.turn(session_id, histories[session_id], start=True, max_tokens=3)
        histories[session_id] += answer.token_ids
    for session_id in range(4):
        check_answer(histories[session_id], [9], driver.turn(session_id, [9], max_tokens=3), 3)


def test_hot_sessions_go_on_beside_cold_ones_that_are_never_closed() -> None:
    """B9: 50 hot and 25 never-closed cold sessions; pinned idle sessions filled the pool and nothing moved."""
    driver = FakeDriver(num_pages=60, max_context=32, max_batch_tokens=128)
    for session_id in range(100, 125):
        driver.turn(session_id, [session_id - 100] * 12, start=True, max_tokens=1)
    histories: dict[int, list[int]] = {session_id: [] for session_id in range(50)}
    for number in range(3):
        given = [number + 1] * 4
        answers = {n: driver.post(n, given, start=number == 0, max_tokens=2)[0] for n in histories}
        driver.run()
        for session_id, answer in answers.items():
            check_answer(histories[session_id], given, answer, 2)
    cold = [0] * 12
    cold += expected_tokens(cold, 1)
    check_answer(cold, [7], driver.turn(100, [7], max_tokens=2), 2)


def test_a_session_that_grows_until_the_pool_is_full_is_told_and_others_go_on() -> None:
    """B9: one session that grew until the pool was full stopped everybody."""
    driver = FakeDriver(num_pages=8, max_context=32)
    driver.turn(2, [5], start=True, max_tokens=1)
    history: list[int] = []
    answer = driver.turn(1, [6] * 4, start=True, max_tokens=4)
    while answer.error is None:
        check_answer(history, [6] * 4, answer, 4)
        answer = driver.turn(1, [6] * 4, max_tokens=4)
    assert answer.error.code == "CONTEXT_FULL"
    assert len(history) == 32
    assert driver.turn(2, [7], max_tokens=2).token_ids == expected_tokens([5, *expected_tokens([5], 1), 7], 2)


def test_two_sessions_that_each_want_the_whole_pool_both_end() -> None:
    """B9: two sessions waited for each other's pages."""
    driver = FakeDriver(num_pages=8, max_context=32, max_batch_tokens=4)
    answers = [driver.post(n, [n] * 16, start=True, max_tokens=16)[0] for n in (1, 2)]
    driver.run()
    for n, answer in enumerate(answers, start=1):
        assert answer.token_ids == expected_tokens([n] * 16, 16)


def test_sessions_parked_longest_ago_are_computed_again_and_the_others_are_not() -> None:
    driver = FakeDriver(num_pages=10, max_context=32)
    for session_id in (1, 2, 3):
        driver.turn(session_id, [session_id] * 12, start=True, max_tokens=0)
    driver.turn(1, [5], max_tokens=1)  # used again: 2 is the oldest now
    driver.turn(4, [4] * 8, start=True, max_tokens=0)
    cached = {n: driver.turn(n, [5], max_tokens=0).status.usage["cached_tokens"] for n in (3, 1, 2)}
    assert cached == {3: 11, 1: 13, 2: 0}


def run_until_preempted(driver: FakeDriver, session_id: int) -> None:
    """Steps until a session has lost its pages."""
    for _ in range(200):
        driver.engine.step()
        driver.engine.check_integrity()
        session = driver.engine._sessions.find(session_id)
        if session.running is not None and session.running.num_output > 0 and not session.table.pages:
            return
    raise AssertionError("nobody was preempted")


def under_pressure() -> tuple[FakeDriver, list[int]]:
    """A driver whose session 2, with this history, is the least urgent of two that grow; the pool holds one of them."""
    driver = FakeDriver(num_pages=8, max_context=32)
    history = [2] * 6
    history += driver.turn(2, history, start=True, max_tokens=1).token_ids
    driver.post(1, [1] * 6, start=True, max_tokens=26)
    driver.clock.now_s += 1
    return driver, history


def test_a_preempted_turn_goes_on_where_it_was() -> None:
    driver, history = under_pressure()
    answer, _ = driver.post(2, [3], max_tokens=22)
    run_until_preempted(driver, 2)
    num_before = len(answer.token_ids)
    driver.run()
    assert 0 < num_before < 22
    assert [output.position for output in answer.outputs] == list(range(8, 30)), "no token came twice"
    check_answer(history, [3], answer, 22)


def test_a_turn_cancelled_while_preempted_leaves_the_context_as_it_was() -> None:
    """B4: a preempted turn's partial output was committed as history."""
    driver, history = under_pressure()
    answer, turn = driver.post(2, [3], max_tokens=22)
    run_until_preempted(driver, 2)
    driver.engine.cancel(turn)
    driver.run()
    assert answer.status.finish_reason == "cancelled"
    assert answer.status.context_len == len(history)
    check_answer(history, [4], driver.turn(2, [4], max_tokens=3), 3)


def test_a_close_behind_a_turn_cancelled_while_preempted_comes() -> None:
    """B4: aborted while queued again, its close waited for ever."""
    driver, _ = under_pressure()
    _, turn = driver.post(2, [3], max_tokens=22)
    closing, _ = driver.post(2, end=True)
    run_until_preempted(driver, 2)
    driver.engine.cancel(turn)
    driver.run()
    assert closing.status.finish_reason == "closed"
    driver.turn(1, end=True)
    assert driver.pool.num_free == 8


def lose_pages(driver: FakeDriver, session_id: int) -> None:
    """Lets another session take the pages of a parked one."""
    driver.turn("other", [9] * 28, start=True, end=True, max_tokens=4)
    assert not driver.engine._sessions.find(session_id).table.pages


def test_keeping_a_session_alive_that_lost_its_pages_costs_no_forward_pass() -> None:
    """Every keep-alive of an idle session computed its whole context again and took the pages of others for it."""
    driver = FakeDriver(num_pages=8, max_context=32)
    history = [5] * 20
    driver.turn(1, history, start=True, max_tokens=0)
    lose_pages(driver, 1)
    num_batches = len(driver.runner.batches)
    assert driver.turn(1).status.context_len == 20
    assert len(driver.runner.batches) == num_batches
    check_answer(history, [6], driver.turn(1, [6], max_tokens=3), 3)


def test_closing_a_session_that_lost_its_pages_costs_no_forward_pass() -> None:
    driver = FakeDriver(num_pages=8, max_context=32)
    driver.turn(1, [5] * 20, start=True, max_tokens=0)
    lose_pages(driver, 1)
    num_batches = len(driver.runner.batches)
    assert driver.turn(1, end=True).status.finish_reason == "closed"
    assert len(driver.runner.batches) == num_batches


# ---- shared prefixes -----------------------------------------------------------------------------------------------


def test_the_prefix_of_a_closed_session_is_taken_up() -> None:
    driver = FakeDriver()
    prompt = [5] * 18
    first = driver.turn(1, prompt, start=True, end=True, max_tokens=3)
    second = driver.turn(2, [*prompt, 6], start=True, max_tokens=3)
    assert first.status.usage["cached_tokens"] == 0
    assert second.status.usage["cached_tokens"] == 16
    assert second.token_ids == expected_tokens([*prompt, 6], 3)


def test_without_the_setting_no_prefix_is_kept() -> None:
    driver = FakeDriver(share_prefixes=False)
    driver.turn(1, [5] * 18, start=True, end=True, max_tokens=3)
    assert driver.pool.num_free == 128
    assert driver.turn(2, [5] * 18, start=True, max_tokens=1).status.usage["cached_tokens"] == 0


def test_the_answer_is_part_of_what_is_shared() -> None:
    driver = FakeDriver()
    history = [5] * 6
    history += driver.turn(1, history, start=True, end=True, max_tokens=8).token_ids
    assert driver.turn(2, [*history, 6], start=True, max_tokens=1).status.usage["cached_tokens"] == 12


def test_a_cancelled_first_turn_gives_the_shared_pages_back() -> None:
    driver = FakeDriver(max_batch_tokens=4)
    prompt = [5] * 17
    driver.turn(1, prompt, start=True, end=True, max_tokens=1)
    _, turn = driver.post(2, [*prompt, *[6] * 20], start=True, max_tokens=3)
    driver.engine.step()
    driver.engine.cancel(turn)
    driver.run()
    assert driver.turn(2, [7] * 5, max_tokens=3).token_ids == expected_tokens([7] * 5, 3)
    assert driver.turn(3, prompt, start=True, max_tokens=3).token_ids == expected_tokens(prompt, 3)


@pytest.mark.parametrize("seed", range(4))
def test_shared_pages_give_way_under_pressure_and_change_no_token(seed: int) -> None:
    driver = FakeDriver(num_pages=20, max_context=64, max_batch_tokens=12)
    rng = random.Random(seed)
    stems = [[stem] * 20 for stem in range(3)]
    for _ in range(12):
        posted = []
        for session_id in range(4):
            prompt = [*rng.choice(stems)[: rng.randint(5, 20)], *[rng.randrange(97) for _ in range(rng.randint(0, 9))]]
            answer, _ = driver.post(session_id, prompt, start=True, end=rng.random() < 0.7, max_tokens=5)
            posted.append((prompt, answer))
        driver.run()
        for prompt, answer in posted:
            assert answer.token_ids == expected_tokens(prompt, 5)


def test_pages_that_only_the_prefix_cache_holds_are_free_for_a_turn_that_needs_them() -> None:
    """A page of the prefix cache and of one parked session counted as a page that nobody could give up.

    Under the defaults three sessions on the real server stood still for ever: the first in order was refused, and the
    scheduler let none of the turns behind it run.
    """
    driver = FakeDriver(num_pages=64, page_size=16, max_context=1024)
    histories = {1: [i % 97 for i in range(385)], 2: [3 * i % 97 for i in range(609)], 3: [1, 2, 3, 4]}
    for session_id in (1, 2):
        driver.turn(session_id, histories[session_id], start=True, max_tokens=0)
    answers = {3: driver.post(3, histories[3], start=True, max_tokens=64)[0]}
    driver.steps(3)
    for session_id, given in ((1, [5] * 60), (2, [6] * 4)):
        histories[session_id] += given
        answers[session_id] = driver.post(session_id, given, max_tokens=4)[0]
    driver.run(max_steps=1000)
    for session_id, answer in answers.items():
        assert answer.token_ids == expected_tokens(histories[session_id], 64 if session_id == 3 else 4)


@pytest.mark.parametrize("host_tier_bytes", [0, 2000])
@pytest.mark.parametrize("seed", range(30))
def test_turns_without_options_are_all_answered_in_a_pool_of_one_to_four_contexts(
    seed: int, host_tier_bytes: int
) -> None:
    """What users do first: open, append, ask, in sessions of any length, on a pool that is too small for them all."""
    rng = random.Random(seed)
    num_pages = rng.choice([16, 24, 32, 64])
    driver = FakeDriver(num_pages=num_pages, page_size=4, max_context=64, host_tier_bytes=host_tier_bytes)
    histories: dict[int, list[int]] = {}
    for _ in range(12):
        asked: dict[int, tuple[list[int], Recorder, int]] = {}
        for session_id in rng.sample(range(6), rng.randint(1, 4)):
            is_new = session_id not in histories or len(histories[session_id]) > 40
            if is_new and session_id in histories:
                driver.turn(session_id, end=True)
            first = [rng.choice((1, session_id)), *range(rng.randrange(40))]
            given = first if is_new else [rng.randrange(97) for _ in range(rng.randint(1, 9))]
            num_tokens = rng.randint(0, 8)
            answer, _ = driver.post(session_id, given, start=is_new, max_tokens=num_tokens)
            histories[session_id] = [] if is_new else histories[session_id]
            asked[session_id] = (given, answer, num_tokens)
            driver.steps(rng.randint(0, 3))
        driver.run(max_steps=2000)
        for session_id, (given, answer, num_tokens) in asked.items():
            check_answer(histories[session_id], given, answer, num_tokens)


def test_a_step_without_a_row_though_a_turn_could_run_is_counted_and_fails_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were pages counted wrong, the engine would stand still in silence: planted here, it is seen at once."""
    monkeypatch.setattr(PagePool, "num_freeable", lambda *_: 0)
    driver = FakeDriver(num_pages=16, max_context=64)
    for session_id in (1, 2):
        driver.post(session_id, [session_id] * 30, start=True, max_tokens=30)
    with pytest.raises(AssertionError, match="a step without a row"):
        driver.run(max_steps=200)
    assert driver.engine.recorder.metrics.stalled_steps.total() == 1
