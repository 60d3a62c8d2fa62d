"""Tests of microturn.planning.beat: the simulation against turns that were followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from microturn.planning.beat import Beat, ServingCost, largest, on_time_share, sessions_on_time, turn_latencies_s


@dataclass(frozen=True)
class Linear:
    """A step takes so long, and some more per token."""

    fixed_s: float = 0.010
    token_s: float = 0.0
    jitter: Sequence[float] = (1.0,)

    def step_s(self, num_decodes: int, num_appends: int, num_appended: int) -> float:
        return self.fixed_s + self.token_s * (num_decodes + num_appended)


def test_a_turn_takes_a_step_for_each_token_that_it_makes() -> None:
    assert turn_latencies_s(Beat(num_output=4), Linear(), 1, num_beats=3) == pytest.approx(0.040)
    assert turn_latencies_s(Beat(num_output=1), Linear(), 1, num_beats=3) == pytest.approx(0.010)
    assert turn_latencies_s(Beat(num_output=0), Linear(), 1, num_beats=3) == pytest.approx(0.010)


def test_the_first_step_computes_the_input_and_the_last_token_of_the_turn_before() -> None:
    beat = Beat(num_input=4, num_output=2)
    assert turn_latencies_s(beat, Linear(0.010, 0.001), 1, num_beats=2) == pytest.approx(0.015 + 0.011)


def test_who_comes_while_a_step_runs_waits_for_its_end() -> None:
    latencies_s = turn_latencies_s(Beat(beat_s=0.050), Linear(), 2, num_beats=2)
    # The first: 0 to 40 ms. The second is due at 25, begins at 30 and ends at 70; the first's next begins at 50.
    assert latencies_s == pytest.approx(np.array([[0.040, 0.040], [0.045, 0.045]]))


def test_a_turn_waits_for_the_one_before_and_is_late_by_that() -> None:
    latencies_s = turn_latencies_s(Beat(beat_s=0.030), Linear(), 1, num_beats=4)
    assert latencies_s == pytest.approx(np.array([[0.040, 0.050, 0.060, 0.070]]))


def test_long_inputs_go_in_pieces() -> None:
    beat = Beat(num_input=599, num_output=1, max_step_tokens=256)
    assert turn_latencies_s(beat, Linear(), 1, num_beats=2) == pytest.approx(3 * 0.010)


def test_short_rows_go_before_long_ones() -> None:
    # Both come at once; the decode rows of the first fit beside the pieces of the second's input at every step.
    beat = Beat(beat_s=1.0, num_input=299, num_output=2, max_step_tokens=256)
    latencies_s = turn_latencies_s(replace(beat, spread="even"), Linear(0.6), 2, num_beats=1)
    assert latencies_s[0, 0] == pytest.approx(3 * 0.6)
    assert np.isfinite(latencies_s).all()


def test_what_is_around_the_engine_comes_on_top() -> None:
    def latency_s(beat: Beat, **cost_s: float) -> float:
        (latencies_s,) = turn_latencies_s(replace(beat, cost=ServingCost(**cost_s)), Linear(), 1, num_beats=2)
        assert latencies_s[0] == pytest.approx(latencies_s[1])
        return float(latencies_s[0])

    assert latency_s(Beat(), turn_s=0.004) == pytest.approx(0.044)
    # Each of the four tokens but the last, which comes with the turn's end, holds up a step.
    assert latency_s(Beat(), response_hold_s=0.003) == pytest.approx(0.049)
    assert latency_s(Beat(), response_hold_s=0.003, turn_hold_s=0.020) == pytest.approx(0.069)
    # Whose input takes two steps makes no token in the first.
    assert latency_s(Beat(num_input=299, num_output=2), response_hold_s=0.003) == pytest.approx(0.033)


def test_steps_are_as_uneven_as_they_were_measured() -> None:
    assert turn_latencies_s(Beat(), Linear(jitter=(2.0,)), 1, num_beats=2) == pytest.approx(0.080)
    uneven = turn_latencies_s(Beat(num_output=1), Linear(jitter=(1.0, 3.0)), 1, num_beats=4)
    assert sorted(uneven[0]) == pytest.approx([0.010, 0.010, 0.030, 0.030])


def test_the_share_on_time_and_its_limit() -> None:
    # A turn alone takes 40 ms; with n sessions at once each of the beat's 200 ms is theirs in turns.
    beat, times = Beat(), Linear(0.005, 0.001)
    most = sessions_on_time(beat, times)
    assert on_time_share(beat, times, most) >= 0.99
    assert on_time_share(beat, times, most + 1) < 0.99
    # Eight tokens a turn: 200 ms cannot hold more than 25 such turns, were there no fixed part.
    assert 5 < most < 25
    assert sessions_on_time(replace(beat, beat_s=0.4), times) > most
    assert sessions_on_time(beat, Linear(0.3)) == 0


def test_a_hopeless_run_ends_and_counts_as_late() -> None:
    assert on_time_share(Beat(), Linear(1.0), 50) == 0.0


def test_the_same_seed_is_the_same_run() -> None:
    beat, times = Beat(spread="random"), Linear(0.005, 0.001)
    first, again, other = (turn_latencies_s(beat, times, 12, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("most", [1, 5, 16])
@pytest.mark.parametrize("capacity", range(18))
def test_the_search_finds_the_capacity_and_has_tried_one_more(capacity: int, most: int) -> None:
    tried = []

    def is_enough(num: int) -> bool:
        tried.append(num)
        return num <= capacity

    assert largest(is_enough, most) == min(capacity, most)
    assert len(tried) == len(set(tried)) <= 9
    assert max(tried) <= most
    assert capacity >= most or capacity + 1 in tried
