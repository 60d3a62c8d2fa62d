"""Tests of accounts: what sessions take over all tiers, and what they may take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microturn.errors import ResourceExhausted
from microturn.kv.pool import PagePool
from microturn.sessions.accounts import Accounts, ByteLimits
from microturn.sessions.inputs import EmbedInput
from microturn.sessions.session import Session
from support.fake_runner import HIDDEN_SIZE, FakeDriver, expected_tokens
from support.sessions import make_session
from support.snapshots import find

# Pages of 4 tokens; KV of 16 bytes a token, ids of 4.
PAGE_BYTES = 64


def session(number: int = 1, *, num_tokens: int = 8, tenant: str | None = None) -> Session:
    return make_session(PagePool(64, 4), number, context_len=num_tokens, tenant=tenant)


def limits(**kwargs: Any) -> ByteLimits:
    return ByteLimits(kv_bytes=16, page_size=4, **kwargs)


def new_driver(**settings: Any) -> FakeDriver:
    return FakeDriver(max_context=64, **settings)


def test_a_session_takes_whole_pages_and_its_inputs() -> None:
    accounts = Accounts(limits())
    assert accounts.bytes_of(session()) == 2 * PAGE_BYTES + 8 * 4
    assert accounts.bytes_of(session(), 1) == 3 * PAGE_BYTES + 9 * 4
    with_embeds = session()
    with_embeds.context.append_embeds(torch.zeros(4, 100))
    assert accounts.bytes_of(with_embeds) == 3 * PAGE_BYTES + 12 * 4 + 4 * 400


def test_what_a_window_has_given_up_takes_nothing() -> None:
    windowed = session(num_tokens=40)
    windowed.num_dropped = 16
    assert Accounts(limits()).bytes_of(windowed) == 6 * PAGE_BYTES + 40 * 4


def test_recurrent_states_count_as_many_as_a_session_keeps() -> None:
    accounts = Accounts(limits(state_bytes=lambda num_tokens: 1000 * -(-num_tokens // 8)))
    assert accounts.bytes_of(session()) == 2 * PAGE_BYTES + 8 * 4 + 1000
    assert accounts.bytes_of(session(), 1) == 3 * PAGE_BYTES + 9 * 4 + 2000


def test_a_tenant_takes_what_its_sessions_take() -> None:
    accounts = Accounts(limits())
    sessions = [session(1, tenant="a"), session(2, tenant="a"), session(3, num_tokens=4), session(4, tenant="b")]
    for one in sessions:
        accounts.charge(one)
    assert [accounts.of_tenant(tenant) for tenant in ("a", None, "b", "c")] == [320, 80, 160, 0]
    sessions[0].context.append_ids([1])
    accounts.charge(sessions[0])
    assert accounts.of_tenant("a") == 320 + PAGE_BYTES + 4
    accounts.check_integrity()
    for one in sessions:
        accounts.close(one)
    assert accounts.of_tenant("a") == 0
    accounts.check_integrity()


def test_a_session_may_not_take_more_than_its_limit() -> None:
    accounts = Accounts(limits(of_session=160))
    accounts.check(session(), 0)
    with pytest.raises(ResourceExhausted, match=r"would take 228 bytes .* max_session_bytes is 160") as refused:
        accounts.check(session(), 1)
    assert "retry_after_ms" not in refused.value.details, "it would be told the same again"


def test_nor_all_of_a_tenant() -> None:
    accounts = Accounts(limits(of_tenant=320))
    first = session(1, tenant="a")
    accounts.charge(first)
    accounts.check(session(2, tenant="a"), 0)
    accounts.check(session(2, tenant="b"), 4)
    with pytest.raises(ResourceExhausted, match=r"this tenant's sessions would take 388 .* max_tenant_bytes is 320"):
        accounts.check(session(2, tenant="a"), 1)
    accounts.check(first, 4)  # it is not counted twice
    accounts.check(session(1, tenant="a"), 4, replaced=first)


def test_by_default_the_longest_context_of_embeddings_fits() -> None:
    given = {"page_bytes": PAGE_BYTES, "page_size": 4, "max_context": 10, "hidden_size": 100}
    longest = ByteLimits.of(of_session=0, of_tenant=0, more=1000, **given)
    assert longest.of_session == 3 * PAGE_BYTES + 10 * (4 + 400) + 1000
    with_states = ByteLimits.of(
        of_session=0, of_tenant=0, more=1000, **given, state_bytes=lambda num_tokens: num_tokens
    )
    assert with_states.of_session == longest.of_session + 10
    assert ByteLimits.of(of_session=7, of_tenant=8, more=1000, **given) == ByteLimits(16, 4, 7, 8)


# ---- through an engine ---------------------------------------------------------------------------------------------


def test_a_turn_with_which_a_session_would_take_too_much_changes_nothing() -> None:
    driver = new_driver(max_session_bytes=3 * PAGE_BYTES + 12 * 4)
    first = driver.turn(1, [5, 6], start=True, max_tokens=3)
    history = [5, 6, *first.token_ids]
    before = driver.runner.num_tokens
    refused = driver.turn(1, [7] * 4, max_tokens=4)
    assert refused.code == "RESOURCE_EXHAUSTED"
    assert "max_session_bytes" in str(refused.error)
    assert driver.runner.num_tokens == before
    again = driver.turn(1, [7] * 4, max_tokens=3)
    assert again.token_ids == expected_tokens([*history, *[7] * 4], 3)


def test_a_start_with_which_a_tenant_would_take_too_much_opens_nothing_and_replaces_nothing() -> None:
    driver = new_driver(max_tenant_bytes=4 * PAGE_BYTES + 16 * 4)
    driver.turn(1, [5] * 5, start=True, max_tokens=3)
    refused = driver.turn(2, [5] * 6, start=True, max_tokens=3)
    assert refused.code == "RESOURCE_EXHAUSTED"
    assert refused.error is not None
    assert refused.error.details == {"retry_after_ms": 1000}
    assert driver.turn(2).code == "NOT_FOUND"
    assert driver.turn(1, [5] * 14, start=True, max_tokens=3).code == "RESOURCE_EXHAUSTED"
    assert len(find(driver).context) == 8
    assert driver.turn(1, [5] * 9, start=True, max_tokens=3).error is None, "what it replaces makes room"
    driver.turn(1, end=True)
    assert driver.turn(2, [5] * 6, start=True, max_tokens=3).error is None


def test_what_a_turn_that_is_undone_had_taken_is_given_back() -> None:
    driver = new_driver(max_tenant_bytes=4 * PAGE_BYTES + 16 * 4)
    driver.turn(1, [5], start=True, max_tokens=0)
    _, turn = driver.post(1, [5] * 3, max_tokens=8)
    driver.steps(2)
    refused, _ = driver.post(2, [5] * 5, start=True, max_tokens=0)
    driver.steps(1)
    assert refused.code == "RESOURCE_EXHAUSTED"
    driver.engine.cancel(turn)
    driver.run()
    assert driver.turn(2, [5] * 5, start=True, max_tokens=0).error is None


def test_embeddings_count() -> None:
    driver = new_driver(max_session_bytes=2 * PAGE_BYTES + 8 * 4 + 6 * 4 * HIDDEN_SIZE)
    embeds = EmbedInput(torch.zeros(6, HIDDEN_SIZE))
    assert driver.turn(1, embeds, start=True, max_tokens=2).error is None
    driver.turn(1, rewind_to=6)
    assert driver.turn(1, EmbedInput(torch.zeros(1, HIDDEN_SIZE)), max_tokens=1).code == "RESOURCE_EXHAUSTED"


def test_a_branch_counts_in_full() -> None:
    driver = new_driver(max_tenant_bytes=3 * PAGE_BYTES + 12 * 4)
    driver.turn(1, [5] * 6, start=True, max_tokens=2)
    refused = driver.turn(2, [5], start=True, fork_of="1", max_tokens=1)
    assert refused.code == "RESOURCE_EXHAUSTED"
    assert driver.turn(1, [5], max_tokens=1).error is None
