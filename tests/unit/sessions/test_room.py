"""Tests of session_table: room for one more session."""

from __future__ import annotations

import pytest

from microturn.errors import ResourceExhausted
from microturn.kv.pool import PagePool
from microturn.sessions.table import SessionTable
from microturn.settings import Settings
from support.sessions import make_session, make_table


@pytest.fixture
def sessions() -> SessionTable:
    """Two of tenant a, one of nobody."""
    pool, sessions = PagePool(4, 4), make_table()
    for number, tenant in enumerate(("a", "a", None)):
        sessions.add(make_session(pool, number + 1, tenant=tenant))
    return sessions


def test_there_is_room_below_every_bound(sessions: SessionTable) -> None:
    settings = Settings(max_sessions=4, max_sessions_per_tenant=3)
    sessions.check_room(settings, "a")
    sessions.check_room(settings, None)


@pytest.mark.parametrize(
    ("settings", "tenant", "reason"),
    [
        (Settings(max_sessions=3, max_sessions_per_tenant=3), "a", "3 sessions are open"),
        (Settings(max_sessions=3), None, "3 sessions are open"),
        (Settings(max_sessions=4, max_sessions_per_tenant=2), "a", "2 sessions of this tenant are open"),
    ],
)
def test_at_a_bound_there_is_none(sessions: SessionTable, settings: Settings, tenant: str | None, reason: str) -> None:
    with pytest.raises(ResourceExhausted, match=reason) as refused:
        sessions.check_room(settings, tenant)
    assert refused.value.details == {"retry_after_ms": 1000}


def test_a_full_tenant_is_in_nobody_elses_way(sessions: SessionTable) -> None:
    sessions.check_room(Settings(max_sessions=4, max_sessions_per_tenant=2), "b")
    sessions.check_room(Settings(max_sessions=4, max_sessions_per_tenant=2), None)
