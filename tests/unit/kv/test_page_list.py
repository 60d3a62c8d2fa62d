"""Tests of page_list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microturn.kv.page_list import PageIds, PageList


def listed(*pages: int) -> PageList:
    found = PageList()
    found.extend(pages)
    return found


def test_pages_are_taken_away_at_the_end_and_in_the_middle() -> None:
    pages = listed(7, 2, 9, 4, 5)
    assert (len(pages), pages[1]) == (5, 2)
    assert pages.without(slice(1, 3)).tolist() == [7, 4, 5]
    assert pages.truncate(4) == [5]
    assert pages.remove(slice(1, 3)) == [2, 9]
    assert pages.ids.tolist() == [7, 4]
    assert pages.truncate(9) == []
    assert pages.remove(slice(1, 9)) == [4]
    assert (pages.ids.tolist(), pages.truncate(0), len(pages)) == ([7], [7], 0)


def test_what_is_handed_out_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        listed(7).ids[0] = 1


def test_pages_that_are_appended_one_by_one_are_copied_no_more_than_twice_each() -> None:
    """A step that takes a page must not copy those that are there: room is doubled."""
    pages, num_copied = listed(0), 0
    for page in range(1, 5000):
        before = pages.ids
        pages.extend([page])
        num_copied += 0 if np.shares_memory(before, pages.ids) else len(before)
    assert num_copied < 2 * 5000
    assert pages.ids.tolist() == list(range(5000))


changes = st.one_of(
    st.tuples(st.just("extend"), st.lists(st.integers(0, 2**31 - 1), max_size=40)),
    st.tuples(st.just("truncate"), st.integers(0, 60)),
    st.tuples(st.just("remove"), st.tuples(st.integers(0, 60), st.integers(0, 20))),
)


@given(st.lists(changes, max_size=30))
def test_it_is_a_plain_list_and_what_was_handed_out_stays(steps: list[tuple[str, object]]) -> None:
    """The model may still read the table of a step when its session is cut back and goes on elsewhere."""
    pages, plain = PageList(), list[int]()
    handed_out: list[tuple[PageIds, list[int]]] = []
    for change, what in steps:
        if change == "extend":
            assert isinstance(what, list)
            pages.extend(what)
            plain += what
        elif change == "truncate":
            assert isinstance(what, int)
            assert pages.truncate(what) == plain[what:]
            del plain[what:]
        else:
            assert isinstance(what, tuple)
            hidden = slice(what[0], sum(what))
            assert pages.without(hidden).tolist() == plain[: what[0]] + plain[sum(what) :]
            assert pages.remove(hidden) == plain[hidden]
            del plain[hidden]
        assert (len(pages), pages.ids.dtype) == (len(plain), np.int32)
        handed_out.append((pages.ids, plain[:]))
        assert all(ids.tolist() == then for ids, then in handed_out)
