"""Tests of deadlines."""

from __future__ import annotations

from microturn.errors import Unavailable
from microturn.sessions.deadlines import Deadlines
from microturn.sessions.options import TurnOptions
from microturn.sessions.turn import Status, Turn, TurnOutput
from support.sessions import make_turn


def turn_until(deadline_ms: float) -> Turn:
    turn = make_turn()
    turn.options = TurnOptions(deadline_ms=deadline_ms)
    return turn


def test_the_earliest_comes_first_and_each_once() -> None:
    deadlines = Deadlines()
    turns = [turn_until(deadline_ms) for deadline_ms in (300, 100, 0, 200)]
    for turn in turns:
        deadlines.watch(turn)
    assert deadlines.next_s() == 0.1
    late = [deadlines.pop_late(0.25) for _ in range(3)]
    assert late == [turns[1], turns[3], None]
    assert deadlines.next_s() == 0.3


def test_turns_that_have_ended_are_passed_over() -> None:
    deadlines = Deadlines()
    turns = [turn_until(deadline_ms) for deadline_ms in (100, 200)]
    for turn in turns:
        deadlines.watch(turn)
    turns[0].put(TurnOutput(text="a piece"), 0.0)
    assert deadlines.next_s() == 0.1
    turns[0].put(TurnOutput(status=Status("length", None, 0, 3, 3, {}, {}, 60.0, 1)), 0.0)
    assert deadlines.next_s() == 0.2
    turns[1].fail(Unavailable("no"))
    assert deadlines.next_s() is None
    assert deadlines.pop_late(9) is None


def test_their_number_follows_that_of_open_turns() -> None:
    deadlines = Deadlines()
    turns = [turn_until(1000 + number) for number in range(1000)]
    for number, turn in enumerate(turns):
        deadlines.watch(turn)
        if number >= 10:
            turns[number - 10].fail(Unavailable("no"))
    assert len(deadlines) <= 2 * 11 + 64 + 1
    assert deadlines.next_s() == turns[-10].deadline_s
