"""Tests of token_counts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from microturn.kv.page_table import PageTable
from microturn.kv.pool import PagePool
from microturn.sessions.context import Context
from microturn.sessions.token_counts import TokenCounts
from support.sessions import make_session


def told(counts: TokenCounts) -> dict[int, int]:
    assert len(set(counts.ids.tolist())) == len(counts.ids) == len(counts.counts)
    return dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))


def test_the_counts_of_some_tokens() -> None:
    assert told(TokenCounts()) == {}
    assert told(TokenCounts.of([5, 0, 5, 7, 5])) == {5: 3, 0: 1, 7: 1}


def test_the_place_of_an_embedding_is_no_token() -> None:
    context = Context()
    context.append_ids([0, 5])
    context.append_embeds(torch.zeros(3, 2))
    context.append_ids([0])
    counts = TokenCounts().follow(context)
    assert told(counts) == {0: 2, 5: 1}
    assert len(counts) == 6
    counts.cut(3)
    assert told(counts) == {0: 1, 5: 1}
    counts.cut(0)
    assert told(counts) == {}


def test_a_token_costs_no_walk_over_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties walked the whole context for each token: 2.8 ms behind 100,000."""
    context, touched = Context(), list[int]()
    context.append_ids([at % 3000 for at in range(100_000)])
    counts = TokenCounts().follow(context)
    add = counts._add
    monkeypatch.setattr(counts, "_add", lambda token_id, count: (touched.append(token_id), add(token_id, count)))
    context.append_ids([7, 8])
    counts.follow(context).follow(context)
    counts.cut(100_001)
    assert touched == [7, 8, 8]
    assert told(counts)[7] == 35
    assert told(counts)[8] == 34


def test_a_copy_of_a_session_counts_for_itself() -> None:
    pool = PagePool(16, 4)
    session = make_session(pool, context_len=5)
    session.counts.follow(session.context)
    copy = session.at_rest(PageTable(pool))
    session.context.append_ids([9])
    session.counts.follow(session.context)
    assert told(copy.counts.follow(copy.context)) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    copy.check_integrity()


def test_integrity_finds_tokens_that_were_cut_and_still_count() -> None:
    context = Context()
    context.append_ids([1, 2, 3])
    counts = TokenCounts().follow(context)
    counts.check_integrity(context)
    context.truncate(2)
    context.append_ids([4])
    with pytest.raises(AssertionError, match="other tokens"):
        counts.check_integrity(context)


parts = st.one_of(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 4))


@given(st.lists(st.tuples(parts, st.booleans(), st.one_of(st.none(), st.integers(0, 40))), max_size=25))
def test_they_are_the_counts_of_a_plain_list(steps: list[tuple[list[int] | int, bool, int | None]]) -> None:
    """Whatever is appended, counted now or later, and cut back in between."""
    context, counts, plain = Context(), TokenCounts(), list[int | None]()
    for part, counts_now, cut in steps:
        if isinstance(part, int):
            context.append_embeds(torch.zeros(part, 2))
            plain += [None] * part
        else:
            context.append_ids(part)
            plain += part
        if counts_now:
            assert told(counts.follow(context)) == Counter(item for item in plain if item is not None)
        if cut is not None:
            context.truncate(cut)
            counts.cut(cut)
            del plain[cut:]
        counts.check_integrity(context)
    assert told(counts.follow(context)) == Counter(item for item in plain if item is not None)
