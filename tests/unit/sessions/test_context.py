"""Tests of context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microturn.sessions.context import Context


def embeds(*values: float) -> Tensor:
    """Embeddings [n, 2] that can be told apart."""
    return torch.tensor([[value, -value] for value in values])


def items(context: Context) -> list[int | float]:
    """What stands at each position: an id, or the first number of an embedding."""
    found: list[int | float] = list(context.token_ids)
    for span in context.embeds:
        found[span.start : span.start + len(span.embeds)] = span.embeds[:, 0].tolist()
    return found


def test_ids_and_embeddings_share_one_count_of_positions() -> None:
    context = Context()
    context.append_ids([5, 6])
    context.append_embeds(embeds(0.5, 0.25))
    context.append_ids([7])
    assert len(context) == 5
    assert items(context) == [5, 6, 0.5, 0.25, 7]
    assert context.embeds[0].start == 2


def test_the_last_token_is_none_after_an_embedding_and_in_an_empty_context() -> None:
    context = Context()
    assert context.last_token_id is None
    context.append_ids([5])
    assert context.last_token_id == 5
    context.append_embeds(embeds(0.5))
    assert context.last_token_id is None
    context.append_ids([0])
    assert context.last_token_id == 0
    context.truncate(2)
    assert context.last_token_id is None


def test_appending_no_embeddings_changes_nothing() -> None:
    context = Context()
    context.append_embeds(torch.empty(0, 2))
    assert len(context) == 0
    assert context.embeds == []


def test_truncation_cuts_through_an_embedding_span() -> None:
    context = Context()
    context.append_ids([5])
    context.append_embeds(embeds(0.5, 0.25, 0.125))
    context.append_ids([6])
    context.truncate(3)
    assert items(context) == [5, 0.5, 0.25]
    context.truncate(1)
    assert items(context) == [5]
    assert context.embeds == []


def test_a_cut_looks_at_what_it_takes_away_alone() -> None:
    """Each barge-in made a new list of all spans of embeddings: 37 ms at 18,000 of them, an hour of speech."""
    context = Context()
    for _ in range(6):
        context.append_ids([5])
        context.append_embeds(embeds(0.5, 0.25))
    before = list(context.embeds)
    tail = context.split(11)
    assert [left is span for left, span in zip(context.embeds, before, strict=False)] == [True, True, True, False]
    context.extend(tail)
    context.truncate(9)
    assert all(left is span for left, span in zip(context.embeds, before, strict=False))
    assert len(context.embeds) == 3


def test_truncation_beyond_the_end_changes_nothing() -> None:
    context = Context()
    context.append_ids([5])
    context.truncate(9)
    assert items(context) == [5]


def test_a_context_is_split_in_two_and_put_together_again() -> None:
    context = Context()
    context.append_ids([5])
    context.append_embeds(embeds(0.5, 0.25, 0.125))
    context.append_ids([6])
    for length, (head, tail) in {
        0: ([], [5, 0.5, 0.25, 0.125, 6]),
        1: ([5], [0.5, 0.25, 0.125, 6]),
        3: ([5, 0.5, 0.25], [0.125, 6]),
        4: ([5, 0.5, 0.25, 0.125], [6]),
        5: ([5, 0.5, 0.25, 0.125, 6], []),
    }.items():
        rest = context.split(length)
        assert (items(context), items(rest)) == (head, tail)
        context.extend(rest)
        assert items(context) == [5, 0.5, 0.25, 0.125, 6]


def test_what_was_split_off_does_not_change_with_what_is_appended_since() -> None:
    context = Context()
    context.append_ids([5, 6, 7])
    context.append_embeds(embeds(0.5, 0.25))
    tail = context.split(2)
    context.append_ids([8])
    context.append_embeds(embeds(0.125))
    assert items(tail) == [7, 0.5, 0.25]
    context.extend(tail)
    assert items(context) == [5, 6, 8, 0.125, 7, 0.5, 0.25]


def test_spans_between_positions_count_from_the_first_of_them() -> None:
    context = Context()
    context.append_ids([5, 6, 7])
    context.append_embeds(embeds(0.5, 0.25, 0.125))
    (span,) = context.embeds_between(4, 6)
    assert span.start == 0
    assert span.embeds[:, 0].tolist() == [0.25, 0.125]
    (span,) = context.embeds_between(1, 4)
    assert span.start == 2
    assert span.embeds[:, 0].tolist() == [0.5]
    assert context.embeds_between(0, 3) == []
    assert context.embeds_between(6, 6) == []


def test_known_ids_leave_out_the_places_of_embeddings() -> None:
    context = Context()
    context.append_ids([0, 5])
    context.append_embeds(embeds(0.5, 0.25))
    context.append_ids([0, 6])
    assert context.known_ids() == [0, 5, 0, 6]


parts = st.lists(st.one_of(st.lists(st.integers(1, 50), max_size=5), st.lists(st.floats(0.001, 0.5), max_size=4)))


@settings(max_examples=150, deadline=None)
@given(
    before=parts,
    cut=st.integers(0, 30),
    is_put_back=st.booleans(),
    after=parts,
    first=st.integers(0, 30),
    length=st.integers(0, 30),
)
def test_a_context_is_a_plain_list(
    before: list[list[int | float]],
    cut: int,
    is_put_back: bool,
    after: list[list[int | float]],
    first: int,
    length: int,
) -> None:
    context = Context()
    plain: list[int | float] = []
    for step in (before, after):
        for part in step:
            if part and isinstance(part[0], float):
                values = embeds(*part)
                context.append_embeds(values)
                plain += values[:, 0].tolist()
            else:
                context.append_ids(part)
                plain += part
        if step is before:
            tail = context.split(cut)
            assert items(tail) == plain[cut:]
            if is_put_back:
                context.extend(tail)
            else:
                del plain[cut:]
    assert items(context) == plain
    assert len(context) == len(plain)
    assert context.known_ids() == [item for item in plain if isinstance(item, int)]
    row: list[int | float] = list(context.token_ids[first : first + length])
    for span in context.embeds_between(first, first + length):
        row[span.start : span.start + len(span.embeds)] = span.embeds[:, 0].tolist()
    assert row == plain[first : first + length]


def test_embeddings_are_put_back_where_they_stood() -> None:
    context, again = Context(), Context()
    context.append_ids([5, 6])
    context.append_embeds(embeds(0.5, 0.25))
    context.append_ids([7])
    context.append_embeds(embeds(0.75))
    again.append_ids(context.token_ids)
    again.place_embeds([2, 5], [embeds(0.5, 0.25), embeds(0.75)])
    assert items(again) == items(context)


@pytest.mark.parametrize("starts", [[0, 1], [3, 0], [0, 4]])
def test_embeddings_are_not_put_where_they_cannot_have_stood(starts: list[int]) -> None:
    context = Context()
    context.append_ids([1, 2, 3, 4, 5])
    with pytest.raises(AssertionError):
        context.place_embeds(starts, [embeds(0.5, 0.25), embeds(0.75, 1.0)])


# ---- what is forgotten ---------------------------------------------------------------------------------------------


def long_context() -> tuple[Context, list[int | float]]:
    """Ids and embeddings at 20 positions, and the same as a list."""
    context = Context()
    for first in range(1, 17, 4):
        context.append_ids([first, first + 1, first + 1])
        context.append_embeds(embeds(first / 64, (first + 1) / 64))
    plain: list[int | float] = []
    for first in range(1, 17, 4):
        plain += [first, first + 1, first + 1, first / 64, (first + 1) / 64]
    return context, plain


@pytest.mark.parametrize("first_kept", range(2, 21))
def test_what_is_forgotten_leaves_the_others_where_they_were(first_kept: int) -> None:
    context, plain = long_context()
    context.forget(2, first_kept)
    assert (len(context), context.num_forgotten) == (20, first_kept - 2)
    assert context.first_kept == (first_kept if first_kept > 2 else 0)
    assert list(context.kept_ids()) == [
        0 if isinstance(item, float) else item for item in plain[:2] + plain[first_kept:]
    ]
    for first, last in ((0, 2), (first_kept, 20)):
        row: list[int | float] = list(context.ids_between(first, last))
        for span in context.embeds_between(first, last):
            row[span.start : span.start + len(span.embeds)] = span.embeds[:, 0].tolist()
        assert row == plain[first:last]
    assert sorted(context.known_ids()) == sorted(item for item in plain if isinstance(item, int))
    num_embeds = sum(isinstance(item, float) for item in plain[first_kept:])
    assert context.num_bytes == context.forgotten_counts.nbytes + 4 * (2 + 20 - first_kept) + 8 * num_embeds


def test_forgetting_again_and_again_is_as_forgetting_at_once() -> None:
    context, _ = long_context()
    for first_kept in (3, 7, 7, 12, 19):
        context.forget(2, first_kept)
    at_once, _ = long_context()
    at_once.forget(2, 19)
    assert (context.kept_ids(), items_behind(context)) == (at_once.kept_ids(), items_behind(at_once))
    assert context.known_ids() == at_once.known_ids()
    assert context.num_bytes == at_once.num_bytes


def items_behind(context: Context) -> list[tuple[int, float]]:
    """Where the kept embeddings stand."""
    return [(span.start + at, row) for span in context.embeds for at, row in enumerate(span.embeds[:, 0].tolist())]


def test_what_is_forgotten_is_let_go_though_its_neighbours_stay() -> None:
    """A view would keep the memory of the whole."""
    context = Context()
    context.append_embeds(torch.zeros(100, 2))
    context.forget(2, 98)
    assert [span.embeds.untyped_storage().nbytes() for span in context.embeds] == [16, 16]


def test_a_forgotten_position_is_nobodys_to_ask_for() -> None:
    context, _ = long_context()
    context.forget(2, 9)
    for ask in (
        lambda: context.ids_between(1, 3),
        lambda: context.ids_between(8, 12),
        lambda: context.embeds_between(2, 9),
        lambda: context.token_ids,
        lambda: context.split(8),
        lambda: context.truncate(2),
        lambda: context.forget(2, 8),
        lambda: context.forget(3, 12),
    ):
        with pytest.raises(AssertionError):
            ask()
    assert len(context) == 20


def test_a_context_with_a_gap_grows_is_cut_and_copied_like_any_other() -> None:
    context, plain = long_context()
    context.forget(2, 9)
    copy = context.copy()
    tail = context.split(12)
    context.append_ids([50])
    assert context.ids_between(9, 13)[-1] == 50
    context.truncate(12)
    context.extend(tail)
    for same in (context, copy):
        assert items_behind(same)[-1][0] == 19
        assert same.ids_between(9, 20) == [0 if isinstance(item, float) else item for item in plain[9:]]
        assert same.num_kept_between(0, 20) == 13
        assert same.num_kept_between(0, 2) == 2
        assert same.num_kept_between(5, 12) == 3
        assert same.num_kept_between(12, 9) == 0
    assert copy.num_bytes == context.num_bytes
    assert copy.last_token_id is context.last_token_id is None


def test_a_gap_is_recalled_as_it_was() -> None:
    context, _ = long_context()
    context.forget(2, 9)
    again = Context()
    again.recall_gap(context.num_sinks, context.num_forgotten, context.forgotten_counts)
    again.append_ids(context.kept_ids())
    again.place_embeds([span.start for span in context.embeds], [span.embeds for span in context.embeds])
    assert (len(again), again.num_bytes, items_behind(again)) == (20, context.num_bytes, items_behind(context))
    assert again.known_ids() == context.known_ids()
    with pytest.raises(AssertionError):
        again.recall_gap(2, 3, context.forgotten_counts)
