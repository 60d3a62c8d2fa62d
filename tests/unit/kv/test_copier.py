"""Tests of kv_copier: how many pages a step has time for. What is copied is tested in test_kv_tensors."""

from __future__ import annotations

import pytest

from microturn.kv import copier as kv_copier
from microturn.kv.copier import CopyBudget
from support.tiers import make_kv

KV = make_kv(8)


def test_a_budget_is_taken_until_it_is_used_up() -> None:
    budget = CopyBudget(10, 1)
    assert [budget.take(num_pages) for num_pages in (4, 0, 5, 3, 3)] == [4, 0, 5, 1, 0]
    assert budget.num_left == 0


def test_a_copy_costs_whole_units() -> None:
    """So that every copy that is gone on with begins at a unit."""
    budget = CopyBudget(12, 4)
    assert budget.take(5) == 5
    assert budget.num_left == 4
    assert budget.take(9) == 4
    assert budget.take(1) == 0


def test_a_share_is_as_many_pages_as_fit_and_one_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_copier, "_BYTES_FOR_TURNS", 3 * KV.bytes_per_page + 1)
    monkeypatch.setattr(kv_copier, "_BYTES_FOR_LATER", 1)
    share = make_kv(8).share
    assert (share.for_turns, share.for_later, share.unit) == (3, 1, 1)
