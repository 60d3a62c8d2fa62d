"""Tests of load_tests.bench.beat."""

from __future__ import annotations

from load_tests.bench.beat import by_sessions, capacity
from load_tests.bench.beat_level import Level


def level(num_sessions: int, num_on_time: int, num_late: int) -> Level:
    return Level(num_sessions, [100.0] * num_on_time + [300.0] * num_late, num_unanswered=0, ended_early=False)


def test_capacity_is_the_largest_level_with_enough_on_time() -> None:
    assert capacity([level(1, 100, 0), level(2, 99, 1), level(3, 98, 2)]) == 2
    assert capacity([level(1, 98, 2)]) == 0


def test_runs_are_brought_together_by_their_sessions() -> None:
    first, second = [level(1, 10, 0), level(2, 5, 5)], [level(1, 9, 1)]
    assert by_sessions([first, second]) == [[first[0], second[0]], [first[1]]]
