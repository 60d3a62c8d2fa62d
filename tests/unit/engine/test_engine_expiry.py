"""Tests of engine: sessions that are silent for too long."""

from __future__ import annotations

import pytest

from support.fake_runner import FakeDriver, expected_tokens


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(idle_timeout_s=10)


def pass_time(driver: FakeDriver, seconds: float) -> None:
    driver.clock.now_s += seconds
    driver.run()


def test_a_silent_session_expires_and_says_so_to_whoever_comes_back(driver: FakeDriver) -> None:
    driver.turn(1, [5] * 9, start=True, max_tokens=2)
    pass_time(driver, 10)
    assert driver.pool.num_free == 128
    for _ in range(2):
        refused = driver.turn(1, [6])
        assert str(refused.error) == "EXPIRED: session '1' was idle for 10 s: open a new one with START"


def test_a_session_that_speaks_does_not_expire(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    for _ in range(5):
        pass_time(driver, 9.9)
        assert driver.turn(1).error is None
    pass_time(driver, 10)
    assert driver.turn(1).code == "EXPIRED"


def test_each_session_has_its_own_idle_time(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2, idle_timeout_s=3)
    assert driver.turn(2, [5], start=True, max_tokens=2, idle_timeout_s="30").status.expires_in_s == 30
    driver.turn(3, [5], start=True, max_tokens=2)
    pass_time(driver, 5)
    assert [driver.turn(n).code for n in (1, 2, 3)] == ["EXPIRED", None, None]
    pass_time(driver, 15)
    assert [driver.turn(n).code for n in (1, 2, 3)] == ["EXPIRED", None, "EXPIRED"]


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_the_idle_clock_starts_at_the_end_of_a_turn(driver: FakeDriver, num_tokens: int) -> None:
    """B6: it started at admission, so a turn longer than the timeout killed its session on finishing."""
    answer, _ = driver.post(1, [5], start=True, max_tokens=num_tokens)
    for _ in range(num_tokens):
        driver.clock.now_s += 9
        driver.engine.step()
    assert answer.token_ids == expected_tokens([5], num_tokens)
    pass_time(driver, 9.9)
    assert driver.turn(1).code is None
    pass_time(driver, 10)
    assert driver.turn(1).code == "EXPIRED"


def test_a_turn_that_outlasts_the_idle_time_ten_times_ends_well(driver: FakeDriver) -> None:
    answer, _ = driver.post(1, [5], start=True, max_tokens=3)
    driver.engine.step()
    driver.clock.now_s += 100
    driver.run()
    assert answer.status.finish_reason == "length"
    assert driver.turn(1).code is None


def test_a_cancelled_turn_counts_as_activity(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    _, turn = driver.post(1, [6], max_tokens=50)
    driver.engine.step()
    driver.clock.now_s += 30
    driver.engine.cancel(turn)
    driver.run()
    pass_time(driver, 9.9)
    assert driver.turn(1).code is None


def test_a_refused_turn_does_not_keep_a_session_alive_for_who_does_not_own_it(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    pass_time(driver, 6)
    assert driver.turn(1, [1000]).code == "INVALID_ARGUMENT"
    pass_time(driver, 6)
    assert driver.turn(1).code == "EXPIRED"


def test_an_expired_id_can_begin_anew(driver: FakeDriver) -> None:
    driver.turn(1, [5], start=True, max_tokens=2)
    pass_time(driver, 10)
    assert driver.turn(1, [6], start=True, max_tokens=2).token_ids == expected_tokens([6], 2)
    assert driver.turn(1).code is None


def test_an_expired_session_makes_room_for_another() -> None:
    driver = FakeDriver(idle_timeout_s=10, max_sessions=1)
    driver.turn(1, [5], start=True, max_tokens=2)
    pass_time(driver, 10)
    assert driver.turn(2, [5], start=True, max_tokens=2).code is None


def test_sessions_whose_pages_were_taken_expire_like_others() -> None:
    driver = FakeDriver(idle_timeout_s=10, num_pages=8, max_context=32)
    driver.turn(1, [5] * 20, start=True, max_tokens=2)
    driver.turn(2, [5] * 20, start=True, max_tokens=2)
    pass_time(driver, 10)
    assert [driver.turn(n).code for n in (1, 2)] == ["EXPIRED", "EXPIRED"]
    assert driver.pool.num_free == 8
