"""Tests of load_tests.bench.plan_check: which numbers of sessions are tried around a plan."""

from __future__ import annotations

from load_tests.bench.plan_check import CASES, context_len, rungs


def test_numbers_around_a_plan_are_a_twentieth_of_it_apart_where_it_has_so_many() -> None:
    assert rungs(20) == list(range(10, 41))
    assert rungs(1) == [1, 2]
    assert rungs(0) == [1]


def test_a_case_is_planned_at_the_context_in_its_middle() -> None:
    assert [context_len(case) for case in CASES[:2]] == [60 + 12 * 8 // 2, 60 + 6 * 24 // 2]
