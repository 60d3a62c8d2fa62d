"""Tests of answer_pace: what is let through, what waits, what gives way, and that nothing is kept for ever."""

from __future__ import annotations

from microturn.hosts.triton.answer_pace import BURST, MAX_HELD, AnswerPace
from support.clock import Clock


def test_an_allowance_is_whole_again_after_its_time() -> None:
    clock = Clock()
    pace: AnswerPace[int] = AnswerPace(clock)
    for _ in range(3):
        assert sum(pace.admits("a") for _ in range(3 * BURST)) == BURST
        clock.now_s += 3600


def test_what_waits_comes_in_its_order_and_keeps_others_behind_it() -> None:
    clock = Clock()
    pace: AnswerPace[int] = AnswerPace(clock)
    while pace.admits("a"):
        pass
    assert [pace.hold("a", n) for n in range(MAX_HELD + 2)] == [None] * MAX_HELD + [0, 1]
    clock.now_s += 0.25
    assert not pace.admits("a"), "what came earlier goes first"
    assert pace.take_due() == [2, 3]
    assert pace.take_held("a") == list(range(4, MAX_HELD + 2))
    assert not pace.is_waiting


def test_keys_that_have_their_whole_allowance_again_are_forgotten() -> None:
    clock = Clock()
    pace: AnswerPace[int] = AnswerPace(clock)
    for n in range(100_000):
        clock.now_s += 0.001
        assert pace.admits(n)
    assert len(pace._whole_at_s) < 5000
