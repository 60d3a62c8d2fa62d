"""Tests of maintenance, through the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from microturn.engine.maintenance import Maintenance
from microturn.errors import FailedPrecondition, NotFound, Unavailable
from support.fake_runner import FakeDriver, expected_tokens
from support.threads import ThreadedDriver, starting_engines


@pytest.fixture
def start() -> Iterator[Callable[..., ThreadedDriver]]:
    with starting_engines() as start:
        yield start


@pytest.fixture
def driver(start: Callable[..., ThreadedDriver]) -> ThreadedDriver:
    """With two sessions that are parked."""
    driver = start(max_context=4096, num_pages=4096)
    driver.ask(1, [5, 6], start=True, max_tokens=3).wait()
    driver.ask(2, [7], start=True, max_tokens=0, idle_timeout_s=30).wait()
    return driver


def run_long(driver: ThreadedDriver) -> None:
    """Session 1 has a turn that takes a while, and has begun to answer it."""
    answer = driver.ask(1, [8], max_tokens=4000)
    assert answer.begun.wait(10)


def test_sessions_are_described(driver: ThreadedDriver) -> None:
    one, two = driver.engine.call(Maintenance.describe)
    assert (one["id"], one["context_len"], one["state"], one["num_turns"]) == (1, 5, "parked", 1)
    assert (one["kv_len"], one["num_pages"], one["kv"]) == (4, 1, "device")
    assert (two["id"], two["context_len"], two["kv_len"], two["kv"]) == (2, 1, 0, "tokens")
    assert one["bytes"] == {"device": 64, "host": 0, "disk": 0, "inputs": 20}
    assert two["bytes"] == {"device": 0, "host": 0, "disk": 0, "inputs": 4}
    assert 0 <= one["idle_s"] <= one["age_s"] < 10
    assert 20 < two["expires_in_s"] <= 30


@pytest.mark.parametrize("place", ["host", "disk"])
def test_kv_outside_the_pool_is_said_to_be_there(
    start: Callable[..., ThreadedDriver], tmp_path: Path, place: str
) -> None:
    tiers = {"host_tier_bytes": 1 << 20} if place == "host" else {"disk_tier_dir": str(tmp_path)}
    driver = start(num_pages=32, max_context=64, **tiers)
    for session_id in range(1, 9):
        driver.ask(session_id, [session_id, *range(49)], start=True, max_tokens=2).wait()
    deadline_s = time.monotonic() + 30
    places: set[str] = set()
    while place not in places and time.monotonic() < deadline_s:
        places = {session["kv"] for session in driver.engine.call(Maintenance.describe)}
    assert {"device", place} <= places
    away = next(one for one in driver.engine.call(Maintenance.describe) if one["kv"] == place)
    # 51 tokens in pages of four, of 64 bytes.
    assert (away["bytes"][place], away["bytes"]["device"], away["bytes"]["inputs"]) == (13 * 64, 0, 52 * 4)
    copy = driver.engine.call(lambda sessions: sessions.copy("1"))
    assert (copy.kv_len, len(copy.context)) == (0, 52)


def test_a_session_that_runs_is_described_so(driver: ThreadedDriver) -> None:
    run_long(driver)
    one, _ = driver.engine.call(Maintenance.describe)
    assert (one["state"], one["idle_s"], one["expires_in_s"]) == ("running", 0.0, None)
    assert driver.engine.call(lambda sessions: sessions.is_busy)


def test_a_copy_is_newer_than_the_session_until_that_is_told_of_it(driver: ThreadedDriver) -> None:
    copy = driver.engine.call(lambda sessions: sessions.copy("1"))
    again = driver.engine.call(lambda sessions: sessions.copy("1"))
    assert copy.context.token_ids == [5, 6, *expected_tokens([5, 6], 3)]
    driver.engine.call(lambda sessions: sessions.bump_epoch(copy))
    assert driver.engine.call(lambda sessions: sessions.copy("1")).epoch > copy.epoch
    assert again.epoch >= copy.epoch


def test_what_is_not_here_is_not_copied(driver: ThreadedDriver) -> None:
    with pytest.raises(NotFound, match="no session '3' is here"):
        driver.engine.call(lambda sessions: sessions.copy("3"))


def test_a_session_is_given_away(driver: ThreadedDriver) -> None:
    copy = driver.engine.call(lambda sessions: sessions.copy("1"))
    driver.engine.call(lambda sessions: sessions.release_moved(copy))
    assert driver.ask(1, [5]).wait().code == "NOT_FOUND"


def test_a_session_that_has_gone_on_is_not_given_away(driver: ThreadedDriver) -> None:
    copy = driver.engine.call(lambda sessions: sessions.copy("1"))
    driver.ask(1, [5], max_tokens=0).wait()
    with pytest.raises(FailedPrecondition, match="has a turn: try again"):
        driver.engine.call(lambda sessions: sessions.release_moved(copy))
    assert driver.ask(1, [6], max_tokens=0).wait().status.context_len == 7


def test_a_session_that_runs_is_not_given_away(driver: ThreadedDriver) -> None:
    run_long(driver)
    copy = driver.engine.call(lambda sessions: sessions.copy("1"))
    with pytest.raises(FailedPrecondition):
        driver.engine.call(lambda sessions: sessions.release_moved(copy))


def test_a_drain_takes_no_more_turns_and_lets_those_end_that_run(driver: ThreadedDriver) -> None:
    running = driver.ask(1, [8], max_tokens=100)
    assert running.begun.wait(10)
    driver.engine.call(Maintenance.drain)
    refused = driver.ask(2, [9]).wait()
    assert refused.code == "UNAVAILABLE"
    assert "with START and resume" in str(refused.error)
    assert driver.ask(3, [9], start=True).wait().code == "UNAVAILABLE"
    assert len(running.wait().token_ids) == 100


def test_at_rest_every_session_is_as_of_its_last_committed_point(driver: ThreadedDriver) -> None:
    running = driver.ask(1, [8], max_tokens=4000)
    assert running.begun.wait(10)
    one, two = driver.engine.call(Maintenance.quiesce)
    assert running.wait().code == "UNAVAILABLE"
    assert one.context.token_ids == [5, 6, *expected_tokens([5, 6], 3)]
    assert two.context.token_ids == [7]
    assert [session["state"] for session in driver.engine.call(Maintenance.describe)] == ["parked", "parked"]
    driver.engine.call(Maintenance.stop)
    with pytest.raises(Unavailable):
        driver.engine.call(Maintenance.quiesce)
    assert driver.ask(1, [5]).wait().code == "UNAVAILABLE"


@pytest.mark.parametrize("stage", ["running", "waiting", "too late"])
def test_a_stop_undoes_end_with_its_question(driver: ThreadedDriver, stage: str) -> None:
    """Its client is told to ask again where the session goes on."""
    if stage == "waiting":
        assert driver.ask(1, [8], max_tokens=4000).begun.wait(10)
    if stage == "too late":
        driver.engine.call(Maintenance.drain)
    last = driver.ask(1, [9], max_tokens=4000, end=True)
    if stage == "running":
        assert last.begun.wait(10)
    saved = driver.engine.call(Maintenance.quiesce)
    assert last.wait().code == "UNAVAILABLE"
    (session,) = (one for one in saved if one.id == 1)
    assert session.context.token_ids == [5, 6, *expected_tokens([5, 6], 3)]
    assert not session.is_closing


def test_who_asks_is_told_what_went_wrong_and_the_engine_goes_on(driver: ThreadedDriver) -> None:
    def fail(_: Maintenance) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        driver.engine.call(fail)
    assert driver.ask(1, [5], max_tokens=0).wait().status.context_len == 6


@pytest.mark.parametrize("how", ["interrupted", "deadline"])
def test_what_is_not_what_was_copied_any_more_is_not_handed_over(how: str) -> None:
    """A paused turn was told to have ended while its session was on its way: elsewhere it had never been."""
    driver = FakeDriver(max_context=256)
    driver.turn(1, [5, 6], start=True, turn=0, max_tokens=2)
    turn = {"turn": 1, "max_tokens": 50, "deadline_ms": 5000.0}
    _, paused = driver.post(1, [7], **turn)
    driver.steps(3)
    driver.engine.cancel(paused)
    driver.steps(1)
    maintenance = driver.engine._maintenance
    held = maintenance.hold(1)
    assert held is not None
    again, _ = driver.post(1, [7], **turn)
    if how == "interrupted":
        driver.post(1, [9], turn=2, max_tokens=0, on_overlap="interrupt")
    else:
        driver.clock.now_s += 6
    driver.steps(2)
    assert again.status.finish_reason == how
    assert not maintenance.hand_over(held.copy, "there")
    driver.run()
    assert driver.turn(1, [], turn=3 if how == "interrupted" else 2).status.context_len >= again.status.context_len


def test_a_paused_turn_is_done_again_where_its_session_is_handed_over_to() -> None:
    driver = FakeDriver(max_context=256)
    driver.turn(1, [5, 6], start=True, turn=0, max_tokens=2)
    _, paused = driver.post(1, [7], turn=1, max_tokens=50)
    driver.steps(3)
    driver.engine.cancel(paused)
    driver.steps(1)
    held = driver.engine._maintenance.hold(1)
    assert held is not None
    assert driver.engine._maintenance.hand_over(held.copy, "there")
