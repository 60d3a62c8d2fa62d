"""Tests of load_tests.bench.beat_level: nothing that was late may be left out of the account."""

from __future__ import annotations

import asyncio
import time

import pytest

from load_tests.bench import beat_level
from load_tests.bench.beat_level import Level, account, keep_beat

FAST_S = 0.02


@pytest.fixture
def fast_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a beat of 20 ms, 100 ms behind is hopeless."""
    monkeypatch.setattr(beat_level, "BEHIND_S", 0.1)


def test_the_share_on_time_counts_every_turn_once() -> None:
    level = Level(2, [10.0, 200.0, 200.1, 900.0], num_unanswered=1, ended_early=False)
    assert level.on_time_share == 0.5
    assert level.as_json()["on_time_share"] == 0.5
    assert level.as_json()["max_ms"] == 900.0


def test_turns_without_an_answer_are_late_by_what_they_waited() -> None:
    due_s = [10.0, 10.2, 10.4, 10.6]
    level = account([(due_s, [150.0])], end_s=10.7, ended_early=True)
    # The third had waited 300 ms, the fourth 100 ms: it might still have been on time, and is not counted.
    assert level.latencies_ms == pytest.approx([150.0, 500.0, 300.0])
    assert level.num_unanswered == 2
    assert level.on_time_share == pytest.approx(1 / 3)


def test_turns_that_were_never_due_do_not_count() -> None:
    assert account([([10.0, 99.0], [5.0])], end_s=10.5, ended_early=True).latencies_ms == [5.0]


@pytest.mark.usefixtures("fast_beat")
async def test_a_turn_that_waits_for_the_one_before_is_measured_from_its_own_arrival() -> None:
    async def slow(_number: int) -> None:
        await asyncio.sleep(0.05)

    level = await keep_beat([slow], num_turns=3, beat_s=FAST_S)
    for latency_ms, least_ms in zip(level.latencies_ms, [50, 80, 110], strict=True):
        assert latency_ms >= least_ms
    assert level.on_time_share == 0


@pytest.mark.usefixtures("fast_beat")
async def test_a_generator_that_is_held_up_says_so() -> None:
    async def blocking(number: int) -> None:
        if number == 1:
            time.sleep(0.05)  # what a garbage collection or a busy core would do

    level = await keep_beat([blocking, blocking], num_turns=3, beat_s=FAST_S)
    assert max(level.latencies_ms) >= 50
    assert len(level.latencies_ms) == 6
    assert sum(ms >= 20 for ms in level.latencies_ms) >= 3


@pytest.mark.usefixtures("fast_beat")
async def test_phases_are_spread_over_the_beat() -> None:
    began_s: list[float] = []

    async def note(_number: int) -> None:
        began_s.append(time.perf_counter())

    # No session may begin before its phase; that none begins much later is not ours to promise on a busy machine.
    before_s = time.perf_counter()
    await keep_beat([note] * 4, num_turns=1, beat_s=FAST_S)
    for index, at_s in enumerate(began_s):
        assert at_s - before_s >= 0.02 + 0.02 * index / 4


@pytest.mark.usefixtures("fast_beat")
async def test_overload_ends_a_level_early() -> None:
    async def slow(_number: int) -> None:
        await asyncio.sleep(0.05)

    level = await keep_beat([slow], num_turns=1000, beat_s=FAST_S)
    assert level.ended_early
    assert len(level.latencies_ms) < 900  # those that a busy machine made wait count, too
    assert level.num_unanswered > 0
    assert level.on_time_share == 0


@pytest.mark.usefixtures("fast_beat")
async def test_a_server_that_never_answers_is_not_waited_for() -> None:
    async def never(_number: int) -> None:
        await asyncio.Event().wait()

    level = await keep_beat([never], num_turns=3, beat_s=FAST_S)
    assert level.ended_early
    assert level.num_unanswered == 3


@pytest.mark.usefixtures("fast_beat")
async def test_a_turn_that_fails_fails_the_benchmark() -> None:
    async def fail(_number: int) -> None:
        raise RuntimeError("refused")

    async def pass_by(_number: int) -> None: ...

    with pytest.raises(RuntimeError, match="refused"):
        await keep_beat([pass_by, fail], num_turns=3, beat_s=FAST_S)
