"""The page tables of a step."""

from __future__ import annotations

from microturn.attention.step import PagedStep
from microturn.batch import Batch, Row


def test_a_step_lists_pages_and_slots_of_all_rows() -> None:
    step = PagedStep.plan(Batch([Row([1, 2, 3], 3, [7, 2]), Row([4], 0, [5])]), page_size=4)
    assert step.query_indptr.tolist() == [0, 3, 4]
    assert step.context_len.tolist() == [6, 1]
    assert step.page_indptr.tolist() == [0, 2, 3]
    assert step.page_ids.tolist() == [7, 2, 5]
    # Position 3 is the last of page 7; 4 and 5 are the first of page 2; the other row begins page 5.
    assert step.slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4]
