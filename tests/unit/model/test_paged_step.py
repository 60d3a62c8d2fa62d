"""The page tables of a step."""

from __future__ import annotations

import random

import numpy as np

from microturn.model.batch import Batch, Row, RowPages
from microturn.model.paged_step import PagedStep


def test_a_step_lists_pages_and_slots_of_all_rows() -> None:
    (step,) = PagedStep.plan(Batch([Row([1, 2, 3], 3, [7, 2]), Row([4], 0, [5])]), page_size=4)
    assert step.query_indptr.tolist() == [0, 3, 4]
    assert step.context_len.tolist() == [6, 1]
    assert step.page_indptr.tolist() == [0, 2, 3]
    assert step.page_ids.tolist() == [7, 2, 5]
    # Position 3 is the last of page 7; 4 and 5 are the first of page 2; the other row begins page 5.
    assert step.slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4]


def test_each_new_token_has_the_slot_of_its_place_among_the_keys_of_its_row() -> None:
    """Rows of one token and of many, in one page and over several, with evicted tokens and without."""
    rng = random.Random(7)
    rows = []
    for _ in range(50):
        num_tokens, num_evicted = rng.choice((1, 1, 5, 40)), rng.choice((0, 0, 16))
        position = num_evicted + rng.randrange(100)
        pages = rng.sample(range(1000), -(-(position - num_evicted + num_tokens) // 16))
        rows.append(Row([1] * num_tokens, position, pages, num_sinks=16, num_evicted=num_evicted))
    (step,) = PagedStep.plan(Batch(rows), page_size=16)
    places = [(row, at) for row in rows for at in range(row.start, row.context_len)]
    assert step.slots.tolist() == [row.pages[at // 16] * 16 + at % 16 for row, at in places]
    assert step.num_sinks.tolist() == [16 if row.num_evicted else 0 for row in rows]


def test_each_group_of_layers_has_pages_and_slots_of_its_own() -> None:
    """Two groups of layers that do not keep the first two pages; the first kind of layers does not matter to them."""
    rows = [
        Row([1, 2, 3], 11, [0] * 4, others=[RowPages([7, 6, 2, 9], num_evicted=8)]),
        Row([4], 0, [0], others=[RowPages([5, 1])]),
    ]
    steps = PagedStep.plan(Batch(rows), page_size=4, kind=1, num_groups=2)
    assert [step.page_ids.tolist() for step in steps] == [[7, 2, 5], [6, 9, 1]]
    assert [step.slots.tolist() for step in steps] == [[7 * 4 + 3, 2 * 4, 2 * 4 + 1, 20], [6 * 4 + 3, 36, 37, 4]]
    for step in steps:
        assert step.context_len.tolist() == [6, 1]
        assert step.page_indptr.tolist() == [0, 2, 3]
        assert step.query_indptr.tolist() == [0, 3, 4]
        assert (step.num_sinks.tolist(), step.num_evicted.tolist()) == ([0, 0], [8, 0])
        assert step.page_ids.flags.c_contiguous


def test_the_table_of_a_session_is_laid_out_like_a_list_of_pages() -> None:
    """Rows bring int32 arrays, which are copied as they are: no page id becomes a number of Python's."""
    pages = np.array([7, 6, 2, 9], np.int32)
    pages.flags.writeable = False
    for num_groups in (1, 2):
        of_lists = PagedStep.plan(Batch([Row([4], 4, pages.tolist()), Row([4], 0, [5] * num_groups)]), 4, 0, num_groups)
        of_arrays = PagedStep.plan(Batch([Row([4], 4, pages), Row([4], 0, [5] * num_groups)]), 4, 0, num_groups)
        for ours, theirs in zip(of_arrays, of_lists, strict=True):
            assert ours.page_ids.dtype == np.int32
            assert ours.page_ids.tolist() == theirs.page_ids.tolist()
            assert ours.slots.tolist() == theirs.slots.tolist()
            assert not np.shares_memory(ours.page_ids, pages)
