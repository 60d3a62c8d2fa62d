"""Tests of engine: `fork_of`, a session that goes on from another one and shares its pages."""

from __future__ import annotations

import pytest
import torch

from microturn.errors import FailedPrecondition, InvalidArgument, MicroturnError, NotFound, PermissionDenied
from microturn.sessions.inputs import EmbedInput
from support.fake_runner import HIDDEN_SIZE, FakeDriver, expected_tokens

PAGE_SIZE = 4


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(page_size=PAGE_SIZE, max_context=128, max_batch_tokens=32)


def told(driver: FakeDriver, given: list[int], **options: object) -> list[int]:
    """What session 1 holds after a first turn."""
    return given + driver.turn(1, given, start=True, **options).token_ids


def check_both_go_on(driver: FakeDriver, parent: list[int], branch: list[int]) -> None:
    """Both sessions answer, turn about, as if they were alone."""
    for round_number in range(3):
        for session_id, history in ((1, parent), ("branch", branch)):
            given = [session_id == 1, 7, round_number]
            answer = driver.turn(session_id, [int(token_id) for token_id in given], max_tokens=3)
            history += [int(token_id) for token_id in given]
            assert answer.token_ids == expected_tokens(history, 3)
            history += answer.token_ids


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 30])
def test_both_go_on_by_themselves(driver: FakeDriver, length: int) -> None:
    """Oracle 5: a branch equals a session that was told all of it."""
    history = told(driver, [*range(1, length + 1)], max_tokens=2)
    answer = driver.turn("branch", [9], start=True, fork_of="1", max_tokens=4)
    assert answer.token_ids == expected_tokens([*history, 9], 4)
    assert answer.status.turn == 0
    check_both_go_on(driver, history, [*history, 9, *answer.token_ids])


def test_a_branch_computes_less_than_a_page_again(driver: FakeDriver) -> None:
    history = told(driver, [5] * 60, max_tokens=1)
    computed = driver.runner.num_tokens
    status = driver.turn("branch", [6, 7], start=True, fork_of="1").status
    assert driver.runner.num_tokens - computed <= PAGE_SIZE + 2 + status.usage["output_tokens"]
    assert status.usage["cached_tokens"] >= len(history) - 1 - PAGE_SIZE


def test_a_branch_takes_no_pages_for_what_it_shares(driver: FakeDriver) -> None:
    told(driver, [5] * 60, max_tokens=1)
    free = driver.pool.num_free
    for branch in range(10):
        driver.turn(f"branch {branch}", start=True, fork_of="1")
    assert driver.pool.num_free == free
    driver.turn("branch 0", [1], max_tokens=1)
    assert driver.pool.num_free >= free - 2


def test_a_running_session_is_forked_at_its_last_committed_point(driver: FakeDriver) -> None:
    history = told(driver, [1, 2, 3, 4, 5, 6], max_tokens=3)
    answer, _ = driver.post(1, [8] * 5, max_tokens=20)
    for _ in range(4):
        driver.engine.step()
    branch = driver.turn("branch", [9], start=True, fork_of="1", max_tokens=3)
    assert branch.token_ids == expected_tokens([*history, 9], 3)
    assert answer.token_ids == expected_tokens([*history, *[8] * 5], 20)


def test_what_a_running_turn_has_cut_is_in_the_branch(driver: FakeDriver) -> None:
    """Its cut is undone should the turn fail, so it is not committed."""
    history = told(driver, [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=3)
    driver.post(1, [8] * 40, max_tokens=9, rewind_to=4)
    driver.engine.step()
    branch = driver.turn("branch", [9], start=True, fork_of="1", max_tokens=3)
    assert branch.token_ids == expected_tokens([*history, 9], 3)


def test_a_branch_may_begin_further_back(driver: FakeDriver) -> None:
    history = told(driver, [*range(20)], max_tokens=3)
    for cut_at in (0, 3, 4, 13, 22):
        branch = driver.turn(f"at {cut_at}", [9], start=True, fork_of="1", max_tokens=3, rewind_to=cut_at)
        assert branch.token_ids == expected_tokens([*history[:cut_at], 9], 3)


def test_a_branch_does_not_begin_where_its_parent_has_not_come_yet(driver: FakeDriver) -> None:
    """A parent that is told again by START has nothing before that turn ends; a client has the branch told too."""
    history = [*range(1, 61)]
    first, _ = driver.post(1, history, start=True, max_tokens=0)
    driver.engine.step()
    branch = driver.turn("branch", start=True, fork_of="1", max_tokens=0, rewind_to=60, turn=0)
    assert isinstance(branch.error, FailedPrecondition)
    assert branch.error.details == {"position": 0}
    assert first.status.context_len == 60
    assert driver.turn("branch", start=True, fork_of="1", max_tokens=0, rewind_to=60, turn=0).status.context_len == 60
    check_both_go_on(driver, history, [*history])


def test_rewinding_into_shared_pages_leaves_the_others_theirs(driver: FakeDriver) -> None:
    history = told(driver, [*range(20)], max_tokens=3)
    branch = list(history)
    driver.turn("branch", start=True, fork_of="1")
    answer = driver.turn("branch", [50, 51, 52], rewind_to=6, max_tokens=2)
    branch = [*history[:6], 50, 51, 52]
    assert answer.token_ids == expected_tokens(branch, 2)
    check_both_go_on(driver, history, branch + answer.token_ids)


def test_the_parent_may_go(driver: FakeDriver) -> None:
    history = told(driver, [*range(20)], max_tokens=3)
    driver.turn("branch", start=True, fork_of="1")
    driver.turn(1, end=True)
    assert driver.turn("branch", [1], max_tokens=5).token_ids == expected_tokens([*history, 1], 5)
    driver.turn("branch", end=True)
    assert driver.pool.num_free == driver.pool.num_pages


def test_embeddings_are_forked_too(driver: FakeDriver) -> None:
    embeds = torch.arange(6.0 * HIDDEN_SIZE).reshape(6, HIDDEN_SIZE)
    first = driver.turn(1, EmbedInput(embeds), start=True, max_tokens=2)
    branch = driver.turn("branch", [3], start=True, fork_of="1", max_tokens=3)
    assert branch.token_ids == expected_tokens([*embeds, *first.token_ids, 3], 3)


def test_a_branch_inherits_what_start_set(driver: FakeDriver) -> None:
    first = driver.turn(
        1, [1, 2], start=True, seed=5, temperature=1.0, max_tokens=4, session_key="k", idle_timeout_s=7, max_context=50
    )
    branch = driver.turn("branch", [3], start=True, fork_of="1", session_key="k")
    alone = driver.turn("alone", [1, 2, *first.token_ids, 3], start=True, seed=5, temperature=1.0, max_tokens=4)
    assert branch.token_ids == alone.token_ids
    assert (branch.status.seed, branch.status.expires_in_s) == (5, 7)
    with pytest.raises(MicroturnError, match="max_context is 50"):
        _ = driver.turn("branch", [1] * 60, session_key="k").status
    assert driver.turn("other", [3], start=True, fork_of="1", session_key="k", seed=6).status.seed == 6


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"fork_of": "nobody"}, NotFound),
        ({"fork_of": "99999999999999999999"}, NotFound),
        ({"fork_of": "1"}, PermissionDenied),
        ({"fork_of": "1", "session_key": "wrong"}, PermissionDenied),
        ({"fork_of": "branch", "session_key": "k"}, NotFound),
        ({"fork_of": "1", "session_key": "k", "tools": '[{"name": "x"}]'}, InvalidArgument),
        ({"fork_of": "1", "session_key": "k", "cache_salt": "x"}, InvalidArgument),
        ({"fork_of": "1", "session_key": "k", "rewind_to": 1000}, MicroturnError),
    ],
)
def test_a_refused_branch_opens_nothing(driver: FakeDriver, options: dict[str, object], error: type[Exception]) -> None:
    told(driver, [1] * 9, max_tokens=2, session_key="k")
    free = driver.pool.num_free
    answer = driver.turn("branch", [1], start=True, **options)
    assert isinstance(answer.error, error)
    assert driver.engine._sessions.find("branch") is None
    assert driver.pool.num_free == free


def test_a_session_is_not_forked_into_itself(driver: FakeDriver) -> None:
    history = told(driver, [1] * 9, max_tokens=2)
    assert isinstance(driver.turn(1, [1], start=True, fork_of="1").error, InvalidArgument)
    assert driver.turn(1, [2], max_tokens=2).token_ids == expected_tokens([*history, 2], 2)


def test_a_parent_without_its_pages_is_computed_again(driver: FakeDriver) -> None:
    history = told(driver, [*range(20)], max_tokens=3)
    while driver.engine._tiers.reclaim():
        pass
    branch = driver.turn("branch", [9], start=True, fork_of="1", max_tokens=3)
    assert branch.token_ids == expected_tokens([*history, 9], 3)


def test_a_branch_counts_its_own_tokens_for_penalties() -> None:
    """A branch counted in its parent's counts, and each choice of one was made by the other's tokens, too."""
    driver = FakeDriver(max_context=256)
    penalties = {"max_tokens": 8, "repetition_penalty": 1.8, "presence_penalty": 0.9}
    alone = FakeDriver(max_context=256)
    for one in (driver, alone):
        one.turn(1, [5, 6, 7], start=True, **penalties)
    driver.turn(2, [9], start=True, fork_of="1", **penalties)
    driver.turn(2, [9, 9, 9], **penalties)
    assert driver.turn(1, [8], **penalties).token_ids == alone.turn(1, [8], **penalties).token_ids
