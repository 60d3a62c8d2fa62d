"""Tests of load_tests.load.player: who plays tokens starves exactly when none is there."""

from __future__ import annotations

import pytest

from load_tests.load.player import Player


def stalls(arrivals: list[tuple[float, int]], token_s: float = 0.05) -> list[float]:
    player = Player(token_s)
    return [player.arrive(at_s, num) for at_s, num in arrivals]


def test_the_wait_for_the_first_token_is_no_underrun() -> None:
    assert stalls([(7.0, 1)]) == [0.0]


def test_tokens_that_come_in_time_are_played_without_a_gap() -> None:
    assert stalls([(1.0, 1), (1.05, 1), (1.06, 3), (1.2, 1)]) == [0.0] * 4


def test_a_late_token_is_waited_for_and_what_comes_after_it_plays_later() -> None:
    # The first plays to 1.05 and the second is 30 ms late: it plays to 1.13, so that a third at 1.13 is in time.
    assert stalls([(1.0, 1), (1.08, 1), (1.13, 1)]) == pytest.approx([0.0, 0.03, 0.0])


def test_tokens_in_a_burst_bridge_what_would_be_a_gap() -> None:
    assert stalls([(1.0, 4), (1.19, 4), (1.41, 1)]) == pytest.approx([0.0, 0.0, 0.01])


def test_nobody_starves_between_two_answers() -> None:
    player = Player(0.05)
    player.arrive(1.0, 1)
    player.end()
    assert player.arrive(9.0, 1) == 0.0


def test_the_stall_is_how_much_longer_playing_takes_than_its_tokens() -> None:
    arrivals = [(0.3 * turn + (0.2 if turn == 3 else 0.0), 4) for turn in range(8)]
    played_s = arrivals[-1][0] + 0.2 - arrivals[0][0]
    assert sum(stalls(arrivals)) == pytest.approx(played_s - 8 * 0.2)
