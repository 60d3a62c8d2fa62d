"""Tests of session."""

from __future__ import annotations

import pytest

from microturn.kv.page_table import PageTable
from microturn.kv.pool import PagePool
from microturn.sessions.ownership import is_owner
from support.sessions import make_session, make_turn

KEY = "ours"


@pytest.fixture
def pool() -> PagePool:
    return PagePool(16, 4)


# ---- what a session has to compute ---------------------------------------------------------------------------------


def test_a_turn_that_generates_needs_every_token_in_the_cache(pool: PagePool) -> None:
    session = make_session(pool, context_len=9, kv_len=4)
    session.running = make_turn(max_tokens=1)
    assert session.kv_target == 9
    assert session.num_pending == 5


def test_a_turn_that_only_appends_leaves_the_last_token_to_the_next_one(pool: PagePool) -> None:
    session = make_session(pool, context_len=9, kv_len=4)
    session.running = make_turn(max_tokens=0)
    session.running.num_input = 5
    assert session.kv_target == 8
    assert session.num_pending == 4


@pytest.mark.parametrize("context_len", [0, 1])
def test_a_context_of_one_token_or_none_needs_nothing_to_be_appended(pool: PagePool, context_len: int) -> None:
    session = make_session(pool, context_len=context_len)
    session.running = make_turn(max_tokens=0)
    assert session.num_pending == 0


# ---- whose a session is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tenant", "given"), [("a", "b"), ("a", None), (None, "a")])
def test_a_session_takes_turns_of_its_tenant_only(pool: PagePool, tenant: str | None, given: str | None) -> None:
    session = make_session(pool, tenant=tenant)
    assert not is_owner(session, make_turn(**({} if given is None else {"tenant": given})).request)
    assert is_owner(session, make_turn(**({} if tenant is None else {"tenant": tenant})).request)


def test_a_tenants_key_is_not_anothers(pool: PagePool) -> None:
    session = make_session(pool, tenant="a", key=KEY)
    assert not is_owner(session, make_turn(tenant="b", session_key=KEY).request)
    assert not is_owner(session, make_turn(tenant="a").request)


# ---- copies --------------------------------------------------------------------------------------------------------


def test_a_copy_at_rest_does_not_change_with_the_session(pool: PagePool) -> None:
    session = make_session(pool, context_len=5, kv_len=4)
    copy = session.at_rest(PageTable(pool))
    session.context.append_ids([9])
    session.num_turns += 1
    assert copy.context.token_ids == [1, 2, 3, 4, 5]
    assert (copy.num_turns, copy.table.pages, copy.running) == (0, [], None)
    assert (copy.id, copy.seed, copy.key) == (session.id, session.seed, session.key)
