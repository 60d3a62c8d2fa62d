"""Tests of load_tests.load.schedule and shapes: when turns are due, and how many people there are."""

from __future__ import annotations

import pytest

from load_tests.load.schedule import Schedule, phase
from load_tests.load.shapes import SHAPES, ramp, soak, spike


def test_phases_are_spread_over_the_beat_whoever_comes() -> None:
    assert [phase(index) for index in range(5)] == [0, 0.5, 0.25, 0.75, 0.125]
    assert sorted(phase(index) for index in range(16)) == [index / 16 for index in range(16)]


def test_turns_are_due_on_the_beat_whatever_the_answers_took() -> None:
    schedule = Schedule(not_before_s=10.05, every_s=0.2, phase=0.5)
    due_s = []
    for _ in range(3):
        due_s.append(schedule.due_s)
        schedule.answered()
    assert due_s == pytest.approx([10.1, 10.3, 10.5])


def test_turns_that_were_due_and_are_not_answered_have_waited() -> None:
    schedule = Schedule(not_before_s=10.0, every_s=0.2, phase=0.0)
    schedule.answered()
    assert list(schedule.give_up(10.7)) == pytest.approx([0.5, 0.3, 0.1])
    assert schedule.due_s == pytest.approx(10.8)
    assert list(schedule.give_up(10.75)) == []


def test_a_ramp_has_as_many_steps_as_people() -> None:
    assert [ramp(second, 4, 40) for second in (0, 9.9, 10, 25, 39.9, 40)] == [1, 1, 2, 3, 4, None]


def test_a_soak_is_full_most_of_the_time() -> None:
    counts = [soak(second, 8, 100) for second in range(100)]
    assert counts[0] == counts[-1] // 2 == 1
    assert counts[5:96] == [8] * 91


def test_a_spike_comes_twice_and_goes() -> None:
    counts = [spike(second, 8, 100) for second in range(100)]
    assert counts[29:41] == [2, *[8] * 10, 2]
    assert counts[59:71] == [2, *[8] * 10, 2]
    assert sum(count == 8 for count in counts) == 20


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_ends_and_has_somebody_until_then(name: str) -> None:
    counts = [SHAPES[name](tenth / 10, 5, 30) for tenth in range(300)]
    assert all(count is not None and 1 <= count <= 5 for count in counts)
    assert max(count for count in counts if count) == 5
    assert SHAPES[name](30.0, 5, 30) is None
