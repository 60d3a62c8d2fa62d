"""Tests of deadlines."""

from __future__ import annotations

from microturn.deadlines import Deadlines
from microturn.options import TurnOptions
from microturn.turn import Turn
from support.sessions import make_turn


def turn_until(deadline_ms: float) -> Turn:
    turn = make_turn()
    turn.options = TurnOptions(deadline_ms=deadline_ms)
    return turn


def test_the_earliest_comes_first_and_each_once() -> None:
    deadlines = Deadlines(lambda _: True)
    turns = [turn_until(deadline_ms) for deadline_ms in (300, 100, 0, 200)]
    for turn in turns:
        deadlines.watch(turn)
    assert deadlines.next_s() == 0.1
    late = [deadlines.pop_late(0.25) for _ in range(3)]
    assert late == [turns[1], turns[3], None]
    assert deadlines.next_s() == 0.3


def test_turns_that_have_ended_are_passed_over() -> None:
    is_open: set[Turn] = set()
    deadlines = Deadlines(is_open.__contains__)
    turns = [turn_until(deadline_ms) for deadline_ms in (100, 200)]
    is_open.update(turns)
    for turn in turns:
        deadlines.watch(turn)
    is_open.remove(turns[0])
    assert deadlines.next_s() == 0.2
    is_open.clear()
    assert deadlines.next_s() is None
    assert deadlines.pop_late(9) is None


def test_their_number_follows_that_of_open_turns() -> None:
    is_open: set[Turn] = set()
    deadlines = Deadlines(is_open.__contains__)
    turns = [turn_until(1000 + number) for number in range(1000)]
    for turn in turns:
        is_open.add(turn)
        deadlines.watch(turn)
        if len(is_open) > 10:
            is_open.pop()
    assert len(deadlines) <= 2 * 11 + 64 + 1
    for turn in is_open:
        assert turn in turns
