"""A session as operators are told of it."""

from __future__ import annotations

from typing import Any

from microturn.sessions.session import Session


def described(session: Session, now_s: float, bytes_per_page: int) -> dict[str, Any]:
    """A living session, as `json.dumps` takes it.

    Args:
        session: which.
        now_s: by the engine's clock.
        bytes_per_page: what a page of KV takes.
    """
    return {
        "id": session.id,
        "context_len": len(session.context),
        "kv_len": session.kv_len,
        "num_pages": session.table.num_pages,
        "kv": session.kv_place,
        "bytes": _bytes_of(session, bytes_per_page),
        "state": session.state,
        "num_turns": session.num_turns,
        "num_queued": len(session.queued),
        "age_s": round(now_s - session.opened_s, 3),
        "idle_s": round(now_s - session.last_activity_s, 3) if session.running is None else 0.0,
        "expires_in_s": round(session.expires_s - now_s, 3) if session.running is None else None,
    }


def _bytes_of(session: Session, bytes_per_page: int) -> dict[str, int]:
    """What a session takes, by tier. What it shares counts in full, and KV on its way back in both places."""
    num_bytes = {
        "device": len(session.table.pages) * bytes_per_page,
        "host": 0,
        "disk": 0,
        "inputs": session.context.num_bytes,
    }
    if session.stored is not None and session.kv_place in num_bytes:
        num_bytes[session.kv_place] += session.stored.image.num_bytes
    return num_bytes
