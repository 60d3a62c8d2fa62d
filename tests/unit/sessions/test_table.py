"""Tests of session_table."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import pytest

from microturn.errors import Expired, MicroturnError, NotFound, PermissionDenied
from microturn.kv.pool import PagePool
from microturn.sessions import table as session_table
from microturn.sessions.ownership import check_owner
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable
from microturn.sessions.turn import SessionId
from support.sessions import make_session, make_table, make_turn


@pytest.fixture
def pool() -> PagePool:
    return PagePool(16, 4)


@pytest.fixture
def table() -> SessionTable:
    return make_table()


def get(table: SessionTable, session_id: SessionId) -> Session:
    return table.get(session_id, make_turn(session_id=session_id).request)


def found(table: SessionTable, session_id: SessionId) -> Session:
    session = table.find(session_id)
    assert session is not None
    return session


# ---- whose a session is --------------------------------------------------------------------------------------------

KEY = "ours"


@pytest.mark.parametrize("key", [KEY, "ключ", "k" * 256, "\ud800"])
def test_who_brings_the_key_owns_the_session(table: SessionTable, pool: PagePool, key: str) -> None:
    session = make_session(pool, key=key)
    table.add(session)
    assert table.get(1, make_turn(session_key=key).request) is session


@pytest.mark.parametrize(
    ("key", "given"),
    [
        (KEY, None),
        (KEY, "theirs"),
        (KEY, "our"),
        (KEY, "ours "),
        (KEY, "Ours"),
        (None, KEY),
        (KEY, "\ud800"),
        (KEY, ""),
    ],
)
def test_who_brings_another_key_or_none_is_told_nothing(
    table: SessionTable, pool: PagePool, key: str | None, given: str | None
) -> None:
    session = make_session(pool, "a-session", key=key)
    table.add(session)
    turn = make_turn(session_id="a-session", **({} if given is None else {"session_key": given}))
    for ask in (lambda: table.get("a-session", turn.request), lambda: check_owner(session, turn.request)):
        with pytest.raises(PermissionDenied) as denied:
            ask()
        assert str(denied.value) == (
            "PERMISSION_DENIED: the session belongs to somebody else: bring the session_key that its START set"
        )


def test_a_session_that_has_ended_is_told_of_to_its_owner_only(table: SessionTable, pool: PagePool) -> None:
    for session_id, is_expired in (("closed", False), ("expired", True)):
        session = make_session(pool, session_id, key=KEY)
        table.add(session)
        table.end(session, "expired" if is_expired else "closed")
        told = {str(raises(table, session_id)), str(raises(table, session_id, session_key="theirs"))}
        assert told == {f"NOT_FOUND: no session '{session_id}' is here: open one with START"}
    assert "session 'closed' was closed" in str(raises(table, "closed", session_key=KEY))
    assert "session 'expired' was idle" in str(raises(table, "expired", session_key=KEY))


def raises(table: SessionTable, session_id: SessionId, **options: Any) -> MicroturnError:
    """What a turn is told that asks for a session."""
    with pytest.raises(MicroturnError) as raised:
        table.get(session_id, make_turn(session_id=session_id, **options).request)
    return raised.value


def test_the_sessions_of_each_tenant_are_counted(table: SessionTable, pool: PagePool) -> None:
    sessions = [make_session(pool, number, tenant=tenant) for number, tenant in enumerate(["a", "b", "a", None])]
    for session in sessions:
        table.add(session)
    assert [table.num_of_tenant(tenant) for tenant in ("a", "b", "c", None)] == [2, 1, 0, 1]
    table.end(sessions[0])
    table.end(sessions[1], "expired")
    assert [table.num_of_tenant(tenant) for tenant in ("a", "b", "c", None)] == [1, 0, 0, 1]


def test_a_tenant_that_is_gone_is_forgotten(table: SessionTable, pool: PagePool) -> None:
    """Names that come from outside must not fill the memory."""
    for number in range(100):
        session = make_session(pool, number, tenant=f"tenant {number}")
        table.add(session)
        table.end(session)
    assert not table._num_of_tenant


# ---- who lives, and what is said of who does not -------------------------------------------------------------------


def test_sessions_are_found_by_their_id(table: SessionTable, pool: PagePool) -> None:
    first, second = make_session(pool, 1), make_session(pool, "1")
    table.add(first)
    table.add(second)
    assert len(table) == 2
    assert list(table) == [first, second]
    assert found(table, 1) is first
    assert found(table, "1") is second
    assert table.find("2") is None


def test_ids_are_not_matched_by_their_beginning(table: SessionTable, pool: PagePool) -> None:
    """An abort of 'a1' also aborted 'a10'."""
    for session_id in ("a1", "a10"):
        table.add(make_session(pool, session_id))
    table.end(found(table, "a1"))
    assert found(table, "a10").id == "a10"
    with pytest.raises(NotFound, match="session 'a1' was closed"):
        get(table, "a1")


def test_never_known_closed_and_expired_are_told_apart(table: SessionTable, pool: PagePool) -> None:
    """B15: the close of an unknown id was answered with success."""
    closed, expired = make_session(pool, "closed"), make_session(pool, "expired", idle_timeout_s=7)
    for session in (closed, expired):
        table.add(session)
    table.end(closed)
    table.end(expired, "expired")
    with pytest.raises(NotFound, match="no session 'never' is here: open one with START"):
        get(table, "never")
    with pytest.raises(NotFound, match="session 'closed' was closed"):
        get(table, "closed")
    with pytest.raises(Expired, match="session 'expired' was idle for 7 s"):
        get(table, "expired")


def test_an_id_that_comes_again_is_a_new_session(table: SessionTable, pool: PagePool) -> None:
    table.add(make_session(pool, 1))
    table.end(found(table, 1), "expired")
    again = make_session(pool, 1)
    table.add(again)
    assert found(table, 1) is again


def test_who_comes_back_often_gets_a_new_error_each_time(table: SessionTable, pool: PagePool) -> None:
    """One exception was kept and raised again and again: its traceback grew with each turn and held that turn."""
    table.add(make_session(pool, 1))
    table.end(found(table, 1), "expired")
    depths = set()
    for _ in range(5):
        with pytest.raises(Expired) as raised:
            get(table, 1)
        depths.add(len(traceback.extract_tb(raised.value.__traceback__)))
    assert len(depths) == 1


def test_the_memory_of_ended_sessions_is_bounded(
    table: SessionTable, pool: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_table, "NUM_ENDED_REMEMBERED", 3)
    for session_id in range(5):
        table.add(make_session(pool, session_id))
        table.end(found(table, session_id), "expired")
    known: dict[int, type[MicroturnError]] = {}
    for session_id in range(5):
        with pytest.raises(MicroturnError) as raised:
            get(table, session_id)
        known[session_id] = type(raised.value)
    assert known == {0: NotFound, 1: NotFound, 2: Expired, 3: Expired, 4: Expired}


def test_nothing_holds_an_ended_session(table: SessionTable, pool: PagePool) -> None:
    """The heap of expiry times held closed sessions, their contexts with them, until an hour had passed."""
    table.add(make_session(pool, 1, context_len=1000, idle_timeout_s=3600))
    session = weakref.ref(found(table, 1))
    table.end(found(table, 1))
    gc.collect()
    assert session() is None


def test_the_pages_of_an_ended_session_are_free(table: SessionTable, pool: PagePool) -> None:
    """B5: the last session, ended for lack of memory, never freed its KV."""
    session = make_session(pool, context_len=10, kv_len=9)
    table.add(session)
    table.park(session)
    table.end(session)
    assert pool.num_free == 16
    assert table.parked_longest() is None


def test_a_session_with_a_running_turn_is_not_ended(table: SessionTable, pool: PagePool) -> None:
    session = make_session(pool)
    table.add(session)
    session.running = make_turn()
    with pytest.raises(AssertionError, match="a running turn is ended first"):
        table.end(session)


# ---- parked sessions -----------------------------------------------------------------------------------------------


def test_the_session_parked_longest_ago_is_known(table: SessionTable, pool: PagePool) -> None:
    sessions = [make_session(pool, session_id, context_len=9, kv_len=8) for session_id in range(3)]
    for session in sessions:
        table.add(session)
        table.park(session)
    table.unpark(sessions[0])
    table.park(sessions[0])
    for session in (sessions[1], sessions[2], sessions[0]):
        assert table.parked_longest() is session
        table.unpark(session)
    assert table.parked_longest() is None


def test_a_session_that_is_not_parked_keeps_its_pages(table: SessionTable, pool: PagePool) -> None:
    session = make_session(pool, context_len=9, kv_len=8)
    table.add(session)
    assert table.parked_longest() is None
    table.park(session)
    table.unpark(session)
    assert table.parked_longest() is None


def test_a_parked_session_without_pages_has_nothing_to_give(table: SessionTable, pool: PagePool) -> None:
    session = make_session(pool)
    table.add(session)
    table.park(session)
    assert table.parked_longest() is None


def test_a_parked_session_keeps_no_page_for_a_token_that_never_came(table: SessionTable, pool: PagePool) -> None:
    session = make_session(pool, context_len=5, kv_len=4)
    table.add(session)
    session.table.reserve(5)
    num_free = pool.num_free
    table.park(session)
    assert pool.num_free == num_free + 1


def test_parking_twice_does_not_make_a_session_younger(table: SessionTable, pool: PagePool) -> None:
    """A turn that was refused parks its session again; that is no use of it."""
    first, second = (make_session(pool, session_id, context_len=9, kv_len=8) for session_id in range(2))
    for session in (first, second):
        table.add(session)
        table.park(session)
    parking = table.parking_of(first)
    table.park(first)
    assert table.parked_longest() is first
    assert table.parking_of(first) == parking is not None


def test_a_parking_after_a_turn_is_another_one(table: SessionTable, pool: PagePool) -> None:
    session = make_session(pool, context_len=9, kv_len=8)
    table.park(session)
    parking = table.parking_of(session)
    table.unpark(session)
    assert table.parking_of(session) is None
    table.park(session)
    assert table.parking_of(session) not in (None, parking)


# ---- expiry --------------------------------------------------------------------------------------------------------


def expired_ids(table: SessionTable, now_s: float) -> list[object]:
    """Ends what has expired."""
    expired = table.expired(now_s, lambda _: False)
    for session in expired:
        table.end(session, "expired")
    return [session.id for session in expired]


def test_sessions_expire_in_the_order_of_their_own_times(table: SessionTable, pool: PagePool) -> None:
    for session_id, idle_timeout_s in (("slow", 30.0), ("fast", 10.0), ("middle", 20.0)):
        table.add(make_session(pool, session_id, idle_timeout_s=idle_timeout_s))
    assert table.next_expiry_s() == 10
    assert expired_ids(table, 9.99) == []
    assert expired_ids(table, 10) == ["fast"]
    assert expired_ids(table, 100) == ["middle", "slow"]
    assert table.next_expiry_s() is None


def test_activity_moves_the_expiry(table: SessionTable, pool: PagePool) -> None:
    session = make_session(pool, idle_timeout_s=10)
    table.add(session)
    session.last_activity_s = 7
    assert expired_ids(table, 12) == []
    assert table.next_expiry_s() == 17
    assert expired_ids(table, 16.99) == []
    assert expired_ids(table, 17) == [1]


def test_a_session_with_a_running_turn_does_not_expire(table: SessionTable, pool: PagePool) -> None:
    """B6: a turn longer than the idle time killed its session on finishing."""
    session = make_session(pool, idle_timeout_s=10)
    table.add(session)
    session.running = make_turn()
    assert expired_ids(table, 35) == []
    session.running, session.last_activity_s = None, 36
    assert expired_ids(table, 45) == []
    next_s = table.next_expiry_s()
    assert next_s is not None
    assert next_s <= 46, "nobody would look when the time has come"
    assert expired_ids(table, 46) == [1]


@pytest.mark.parametrize("idle_timeout_s", [5e-324, 1e-300, 1e-12])
def test_an_idle_time_below_the_clocks_resolution_does_not_hold_the_engine_up(
    table: SessionTable, pool: PagePool, idle_timeout_s: float
) -> None:
    """Found by the fuzz: a running session was looked at again and again, since its time never lay ahead."""
    session = make_session(pool, idle_timeout_s=idle_timeout_s)
    table.add(session)
    session.running = make_turn()
    now_s = 86_400.0
    assert now_s + idle_timeout_s == now_s
    assert expired_ids(table, now_s) == []
    session.running = None
    assert expired_ids(table, now_s) == [1]
    assert table.next_expiry_s() is None


def test_a_closed_session_does_not_expire(table: SessionTable, pool: PagePool) -> None:
    table.add(make_session(pool, 1, idle_timeout_s=10))
    table.end(found(table, 1))
    assert expired_ids(table, 100) == []
    with pytest.raises(NotFound, match="was closed"):
        get(table, 1)


def test_the_time_of_a_closed_session_is_not_its_successors(table: SessionTable, pool: PagePool) -> None:
    closed = make_session(pool, 1, idle_timeout_s=10)
    table.add(closed)
    table.end(closed)
    table.add(make_session(pool, 1, idle_timeout_s=10, last_activity_s=5))
    assert expired_ids(table, 14) == []
    assert expired_ids(table, 15) == [1]


# ---- copies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "session_id"), [("7", 7), ("seven", "seven"), ("07", 7), ("٧", "٧")])
def test_an_id_that_was_written_as_text_is_found(
    table: SessionTable, pool: PagePool, name: str, session_id: SessionId
) -> None:
    table.add(make_session(pool, session_id))
    assert table.id_named(name) == session_id


def test_a_living_session_whose_id_is_a_text_of_digits_is_meant_first(table: SessionTable, pool: PagePool) -> None:
    table.add(make_session(pool, 7))
    table.add(make_session(pool, "7"))
    assert table.id_named("7") == "7"


def test_the_newest_epoch_is_known_beyond_a_sessions_end(table: SessionTable, pool: PagePool) -> None:
    session = make_session(pool, 7)
    session.epoch = 12
    assert table.newest_epoch(7) == 0
    table.add(session)
    assert table.newest_epoch(7) == 12
    table.end(session)
    assert table.newest_epoch(7) == 12
