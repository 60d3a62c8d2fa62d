"""Tests of page_track: what one kind of layers keeps of a session."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microturn.kv.layer_groups import LayerKind
from microturn.kv.page_track import Track
from microturn.kv.window import Window

SLIDING = LayerKind(window=20, num_groups=2)


def test_layers_that_see_all_keep_what_their_session_shows() -> None:
    assert Track.of(LayerKind(), None, 8, 4) == Track()
    assert Track.of(LayerKind(num_groups=3), Window(8, 30, 8), 8, 4) == Track(3, num_sinks=8, num_shown=30)


def test_layers_with_a_window_keep_that_and_the_slack_in_whole_pages() -> None:
    assert Track.of(SLIDING, None, 6, 4) == Track(2, window=20, slack=8)


@pytest.mark.parametrize(("length", "is_its_own"), [(30, True), (24, True), (23, False), (5, False)])
def test_a_sessions_window_counts_where_it_is_not_longer_by_a_page(length: int, is_its_own: bool) -> None:
    track = Track.of(SLIDING, Window(8, length, 8), 100, 4)
    shared = Track(2, num_sinks=8, num_shown=length)
    assert track == (Track(2, window=20, slack=16) if is_its_own else shared)


@pytest.mark.parametrize(
    ("window", "length", "slack", "num_sinks"), [(20, 24, 4, 0), (1, 5, 8, 4), (9, 40, 12, 8), (3, 7, 4, 0)]
)
def test_beside_a_sessions_window_they_never_need_more_pages_than_those_that_follow_it(
    window: int, length: int, slack: int, num_sinks: int
) -> None:
    """So whatever fits the pool for layers that see all that the session shows fits for these."""
    rule, page_size, room = Window(num_sinks, length, slack), 4, 13
    own, follower = (Track.of(LayerKind(w), rule, 100, page_size) for w in (window, None))
    most = follower.num_pages(rule.max_kept + room, page_size)
    for context_len in range(300):
        num_unseen = own.num_unseen(context_len - own.slack - 1, page_size)
        kept = Track(window=window, num_evicted=num_unseen)
        assert kept.num_pages(context_len + room, page_size) <= most


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 20])
def test_nothing_is_unseen_that_the_next_token_sees(window: int, page_size: int) -> None:
    track = Track(window=window)
    for kv_len in range(100):
        num_unseen = track.num_unseen(kv_len, page_size)
        oldest_seen = max(0, kv_len - window + 1)
        assert num_unseen % page_size == 0
        assert num_unseen <= oldest_seen < num_unseen + page_size


def test_a_cut_reaches_where_all_is_kept_that_is_seen_behind_it() -> None:
    track = Track(window=5, num_evicted=8)
    assert [kv_len for kv_len in range(20) if track.reaches(kv_len)] == [0, *range(12, 20)]
    track = Track(num_sinks=4, num_evicted=8)
    assert [kv_len for kv_len in range(20) if track.reaches(kv_len)] == [0, 1, 2, 3, 4, *range(12, 20)]
    assert Track(window=5).reaches(1)


@pytest.mark.parametrize("length", [1, 5, 8, 10, 15])
def test_a_sessions_window_is_reached_where_no_token_sees_what_is_evicted(length: int) -> None:
    window = Window(num_sinks=4, length=length, slack=4)
    for num_evicted in (4, 8, 12):
        track = replace(Track.of(LayerKind(), window, 0, 4), num_evicted=num_evicted)
        for kv_len in range(window.num_sinks + 1, 60):
            assert track.reaches(kv_len) == (window.evicted(kv_len) >= num_evicted)


def test_pages_are_numbered_as_if_none_had_gone() -> None:
    track = Track(num_groups=2, num_sinks=4, num_evicted=8)
    assert track.page_numbers(18, 4).tolist() == [0, 0, 3, 3, 4, 4]
    assert track.num_pages(18, 4) == 6
    assert Track(window=3, num_evicted=8).page_numbers(18, 4).tolist() == [2, 3, 4]
    assert track.hidden_pages(12, 4) == slice(2, 4)
