"""Sessions without an engine, in any state that a test wants."""

from __future__ import annotations

from typing import Any

from microturn.kv.page_table import PageTable
from microturn.kv.pool import PagePool
from microturn.sessions.accounts import ByteLimits
from microturn.sessions.history import History
from microturn.sessions.inputs import TokenInput
from microturn.sessions.options import TurnOptions
from microturn.sessions.ownership import KeyHash
from microturn.sessions.results import Results
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable
from microturn.sessions.turn import SessionId, Turn, TurnRequest
from support.driver import IdsOnly, Recorder


def make_table() -> SessionTable:
    """No session yet; what begins and ends is counted where nobody looks."""
    return SessionTable(ByteLimits())


def make_session(
    pool: PagePool,
    session_id: SessionId = 1,
    *,
    context_len: int = 0,
    kv_len: int = 0,
    idle_timeout_s: float = 60.0,
    last_activity_s: float = 0.0,
    key: str | None = None,
    tenant: str | None = None,
) -> Session:
    """A session whose context holds 1, 2, 3, …, the first `kv_len` of them in the cache."""
    session = Session(
        id=session_id,
        history=History(IdsOnly()),
        table=PageTable(pool),
        defaults=TurnOptions(),
        seed=1,
        max_context=10_000,
        idle_timeout_s=idle_timeout_s,
        last_activity_s=last_activity_s,
        results=Results(capacity=1),
        key=KeyHash.of(key),
        tenant=tenant,
    )
    session.context.append_ids(range(1, context_len + 1))
    assert session.table.reserve(kv_len)
    session.table.kv_len = kv_len
    return session


def make_turn(*, max_tokens: int = 1, due_s: float = 0.0, session_id: SessionId = 1, **options: Any) -> Turn:
    """A turn that asks for so many tokens, with other options by name."""
    options["max_tokens"] = max_tokens
    request = TurnRequest(session_id, TokenInput((1,)), Recorder(), 0.0, options=options)
    return Turn(request, options=TurnOptions(**options), due_s=due_s)
