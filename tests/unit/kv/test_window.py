"""Tests of window: which tokens are seen, as a function of the position alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microturn.kv.window import Window

windows = st.builds(
    Window.of_whole_pages,
    st.integers(0, 20),
    st.integers(1, 50),
    st.integers(1, 20),
    page_size=st.sampled_from([1, 4, 16]),
)


def test_a_window_slides_by_its_slack_when_that_has_gathered() -> None:
    window = Window(num_sinks=4, length=8, slack=4)
    assert [window.evicted(position) for position in range(11, 20)] == [0, 0, 0, 0, 4, 4, 4, 4, 8]


def test_sinks_and_slack_are_whole_pages() -> None:
    assert Window.of_whole_pages(4, 100, 20, page_size=16) == Window(num_sinks=16, length=100, slack=32)
    assert Window.of_whole_pages(0, 1, 1, page_size=16) == Window(num_sinks=0, length=1, slack=16)


@given(windows, st.integers(0, 5000))
def test_the_last_tokens_are_seen_and_not_many_more(window: Window, position: int) -> None:
    num_seen = position + 1 - window.evicted(position)
    assert num_seen >= min(position + 1, window.num_sinks + window.length)
    assert num_seen <= window.max_visible


@given(windows, st.integers(0, 5000))
def test_what_is_seen_changes_where_it_says_and_nowhere_before(window: Window, position: int) -> None:
    change = window.sees_less_from(position)
    assert change > position
    assert window.evicted(change - 1) == window.evicted(position)
    assert window.evicted(change) == window.evicted(position) + window.slack


@given(windows, st.integers(0, 5000), st.data())
def test_what_is_droppable_is_not_seen_after_a_rewind_within_the_slack(
    window: Window, context_len: int, data: st.DataObject
) -> None:
    num_droppable = window.droppable(context_len)
    left = data.draw(st.integers(max(0, context_len - window.slack), context_len))
    assert window.evicted(max(0, left - 1)) >= num_droppable
    assert left >= window.shortest_without(num_droppable)
    assert context_len - num_droppable <= max(window.max_kept, window.num_sinks)


@pytest.mark.parametrize("num_evicted", [0, 4, 8, 400])
def test_the_shortest_context_without_some_tokens(num_evicted: int) -> None:
    window = Window(num_sinks=4, length=8, slack=4)
    shortest = window.shortest_without(num_evicted)
    assert window.evicted(max(0, shortest - 1)) == num_evicted
    assert num_evicted == 0 or window.evicted(shortest - 2) < num_evicted
