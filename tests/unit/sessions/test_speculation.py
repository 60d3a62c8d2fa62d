"""Tests of prompt lookup: what is drafted, and when drafting stops."""

from __future__ import annotations

import random
import time

import pytest

from microturn.sessions.context import Context
from microturn.sessions.speculation import Speculation, look_up


def context_of(token_ids: list[int]) -> Context:
    context = Context()
    context.append_ids(token_ids)
    return context


def plain_look_up(ids: list[int], num_tokens: int) -> list[int]:
    """The same by trying all places and lengths."""
    found = max(
        (
            (length, place)
            for place in range(2, len(ids) - 1)
            for length in range(3, 9)
            if place + 1 >= length and ids[place + 1 - length : place + 1] == ids[-length:]
        ),
        default=None,
    )
    if found is None:
        return []
    behind = list(ids)
    for at in range(found[1] + 1, found[1] + 1 + num_tokens):
        behind.append(behind[at])
    return behind[len(ids) :]


@pytest.mark.parametrize("num_ids", [2, 3, 9])
def test_a_draft_is_what_came_behind_the_longest_match_the_last_time(num_ids: int) -> None:
    rng = random.Random(num_ids)
    num_found = 0
    for _ in range(2000):
        ids = rng.choices(range(num_ids), k=rng.randint(0, 40))
        expected = plain_look_up(ids, num_tokens := rng.randint(1, 12))
        assert look_up(ids, num_tokens) == expected, ids
        num_found += bool(expected)
    assert num_found > 20


def test_a_repetition_that_reaches_to_the_end_goes_on() -> None:
    assert look_up([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


def test_new_tokens_have_no_draft() -> None:
    assert look_up(list(range(100)), 4) == []


def test_a_lookup_takes_as_long_in_a_long_context() -> None:
    """Only the last tokens are searched: a place before them is not found."""
    rng = random.Random(1)
    marked = [7_000_001, 7_000_002, 7_000_003, 7_000_004]
    ids = [*marked, *rng.choices(range(10_000, 50_000), k=9000), *marked[:3]]
    assert Speculation().draft(context_of(ids), 4) == []
    assert Speculation().draft(context_of(ids[-8000:]), 4) == []
    assert Speculation().draft(context_of([*marked, *ids[-8000:]]), 1) == marked[3:]
    context = context_of(rng.choices(range(50_000), k=1_000_000))
    speculation = Speculation()
    begun_s = time.process_time()
    for _ in range(100):
        speculation.draft(context, 4)
    assert time.process_time() - begun_s < 1.0, "reading a million tokens a hundred times takes longer"


def test_drafts_grow_while_they_are_accepted_and_shrink_to_what_was() -> None:
    context, speculation = context_of([1, 2, 3] * 40), Speculation()
    lengths = []
    for num_accepted in (4, 8, 16, 3, 0):
        draft = speculation.draft(context, 100)
        lengths.append(len(draft))
        speculation.observe(len(context), len(draft), num_accepted, cost=0.5)
    assert lengths == [4, 8, 16, 16, 4]
    assert len(speculation.draft(context, 100)) == 2
    assert len(speculation.draft(context, 1)) == 1
    assert speculation.draft(context, 0) == []


def test_drafts_that_cost_more_than_they_save_pause_for_longer_and_longer_until_they_pay() -> None:
    context, speculation = context_of([1, 2, 3] * 40), Speculation()

    def lose() -> int:
        """Loses a token's time, twice, and returns how many tokens pass before the next draft."""
        for _ in range(2):
            draft = speculation.draft(context, 100)
            assert draft
            speculation.observe(len(context), len(draft), 0, cost=0.7)
        num_before = len(context)
        while not speculation.draft(context, 100):
            context.append_ids([(len(context) % 3) + 1])
        return len(context) - num_before

    assert [lose(), lose(), lose()] == [64, 128, 256]
    speculation.observe(len(context), 4, 2, cost=0.7)
    speculation.observe(len(context), 4, 0, cost=1.3)
    assert lose() == 64
