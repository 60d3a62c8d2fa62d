"""Tests of beat."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from microturn.sessions.beat import Beat


def beat_of(arrivals_s: Sequence[float]) -> Beat:
    beat = Beat()
    for arrived_s in arrivals_s:
        beat.note(arrived_s)
    return beat


def test_a_regular_session_is_wanted_a_quarter_of_its_beat_before_its_turn() -> None:
    assert beat_of([10.0, 10.2, 10.4, 10.6]).wanted_s == pytest.approx(10.75)


def test_the_last_turns_count() -> None:
    assert beat_of([1, 2, 9, 10, 11, 12]).wanted_s == pytest.approx(12.75)


def test_who_comes_a_little_early_at_times_is_expected_early() -> None:
    assert beat_of([0, 10, 18, 28]).wanted_s == pytest.approx(34)


@pytest.mark.parametrize(
    ("arrivals_s", "wanted_s"), [([0, 60, 120, 180], 239), ([0, 60, 119.5, 179.5], 237.5)], ids=str
)
def test_a_slow_beat_is_wanted_a_second_before_and_what_it_differs_by(arrivals_s: list[float], wanted_s: float) -> None:
    """A hundred sessions that come every 40 s were restored 10 s ahead: a pool for twenty sent them away again."""
    assert beat_of(arrivals_s).wanted_s == pytest.approx(wanted_s)


@pytest.mark.parametrize(
    "arrivals_s", [[], [1], [1, 2, 3], [0, 1, 2, 4], [0, 10, 18, 28.1], [5, 5, 5, 5], [4, 3, 2, 1]], ids=str
)
def test_others_are_not_expected(arrivals_s: list[float]) -> None:
    """Too few turns, irregular ones, all at once, and a clock that runs backwards."""
    assert beat_of(arrivals_s).wanted_s is None
