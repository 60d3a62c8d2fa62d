"""Tests of gauges: what is said of an engine is what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fake_runner import FakeDriver
from support.tiers import settle


def read(driver: FakeDriver, name: str) -> dict[tuple[str, ...], float]:
    """A family's numbers that are not 0, by the values of their labels."""
    samples = driver.engine._maintenance.measure().items()
    return {tuple(value for _, value in labels): number for (of, labels), number in samples if of == name and number}


def test_sessions_by_what_they_do_and_where_their_kv_is() -> None:
    driver = FakeDriver()
    driver.turn(1, [5, 6], start=True, max_tokens=1)
    driver.turn(2, [5], start=True, max_tokens=0)
    driver.post(3, [5, 6], start=True, max_tokens=9)
    driver.post(3, [5], max_tokens=1)
    driver.post(4, [5, 6], start=True, max_tokens=9, end=True)
    driver.engine.step()
    assert read(driver, "microturn_sessions") == {
        ("parked", "device"): 1,
        ("parked", "tokens"): 1,
        ("running", "device"): 1,
        ("closing", "device"): 1,
    }
    assert read(driver, "microturn_turns_open") == {("running",): 2, ("queued",): 1}
    assert read(driver, "microturn_sessions_limit") == {(): 256}


@pytest.mark.parametrize("place", ["host", "disk"])
def test_kv_outside_the_pool(tmp_path: Path, place: str) -> None:
    tiers = {"host_tier_bytes": 1 << 20} if place == "host" else {"disk_tier_dir": str(tmp_path)}
    driver = FakeDriver(num_pages=32, max_context=64, **tiers)
    for session_id in range(1, 9):
        driver.turn(session_id, [session_id, *range(49)], start=True, max_tokens=2)
        driver.steps(5)
        settle(driver)
    driver.steps(2)
    num_bytes = read(driver, "microturn_kv_bytes")
    num_sessions = read(driver, "microturn_sessions")
    assert num_sessions["parked", place] > 0
    assert sum(num_sessions.values()) == 8
    assert num_bytes[(place,)] == num_sessions["parked", place] * driver.pool.num_pages_for(51) * bytes_per_page(driver)
    num_used = driver.pool.num_used
    assert num_bytes[("device",)] == num_used * bytes_per_page(driver)
    assert read(driver, "microturn_kv_capacity_bytes")[("device",)] == driver.pool.num_pages * bytes_per_page(driver)
    assert read(driver, "microturn_kv_evictions_total")[("host",)] >= num_sessions["parked", place]
    driver.turn(1, [5], max_tokens=1)
    settle(driver)
    assert read(driver, "microturn_kv_restores_total") == {(place, "false"): 1}
    driver.engine.stop()


def bytes_per_page(driver: FakeDriver) -> int:
    return driver.runner.kv.bytes_per_page


def test_what_is_computed_again_counts_as_restored_from_tokens() -> None:
    driver = FakeDriver(num_pages=32, max_context=64)
    for session_id in range(1, 12):
        driver.turn(session_id, [session_id, *range(49)], start=True, max_tokens=2)
    assert read(driver, "microturn_kv_restores_total") == {}
    driver.turn(1, [5], max_tokens=1)
    assert read(driver, "microturn_kv_restores_total") == {("tokens", "false"): 1}
    assert read(driver, "microturn_kv_evictions_total")[("tokens",)] > 0


def test_every_page_counts_once() -> None:
    """Shared ones count for who runs before who is parked; what nobody else holds is kept for sessions to come."""
    driver = FakeDriver()
    size = driver.pool.page_size
    driver.turn(1, [*range(2 * size + 1)], start=True, max_tokens=0)
    driver.turn(2, [*range(2 * size + 1)], start=True, max_tokens=0)
    assert read(driver, "microturn_pages") == {("parked",): 2, ("free",): driver.pool.num_pages - 2}
    driver.post(2, [7], max_tokens=5)
    driver.engine.step()
    assert read(driver, "microturn_pages") == {("running",): 3, ("free",): driver.pool.num_pages - 3}
    driver.run()
    driver.turn(1, end=True)
    driver.turn(2, end=True)
    assert read(driver, "microturn_pages") == {("prefix",): 2, ("free",): driver.pool.num_pages - 2}


def test_a_late_reaper_shows() -> None:
    driver = FakeDriver(idle_timeout_s=10)
    driver.turn(1, [5], start=True, max_tokens=0)
    driver.clock.now_s += 9
    assert read(driver, "microturn_reaper_lag_seconds") == {}
    driver.clock.now_s += 4
    assert read(driver, "microturn_reaper_lag_seconds") == {(): pytest.approx(3)}
    driver.steps(1)
    assert read(driver, "microturn_reaper_lag_seconds") == {}


def test_draining_shows() -> None:
    driver = FakeDriver()
    driver.engine._maintenance.drain()
    assert read(driver, "microturn_draining") == {(): 1}


def test_a_preempted_turn_is_counted() -> None:
    driver = FakeDriver(num_pages=8, max_context=8 * 4)
    for session_id in (1, 2):
        driver.post(session_id, [*range(12)], start=True, max_tokens=12)
    driver.run()
    assert read(driver, "microturn_kv_preemptions_total")[()] >= 1
