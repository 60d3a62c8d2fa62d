"""What the host takes for steps and turns: the benchmark runs, and steps are what it says they are."""

from __future__ import annotations

from load_tests.bench.host_beat import measure_beat
from load_tests.bench.host_steps import measure


def test_steps_of_each_kind_are_measured() -> None:
    times = measure([20], [1, 3], [0, 2])
    kinds = {(time.num_rows, time.num_waiting, time.has_penalties, time.is_ahead) for time in times}
    plain = {(rows, waiting, penalties, False) for rows in (1, 3) for waiting in (0, 2) for penalties in (False, True)}
    assert kinds == plain | {(1, 0, False, True), (3, 0, False, True)}
    assert len(times) == len(kinds)
    assert all(time.step_ms > 0 for time in times)


def test_turns_on_the_beat_are_measured() -> None:
    time = measure_beat(32)
    assert time.num_sessions == 32
    assert time.turn_us > 0
