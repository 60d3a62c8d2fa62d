"""What the engine says of its sessions through the admin socket: tests wait for that rather than for some time."""

from __future__ import annotations

import time
from pathlib import Path

from microturn.admin.client import ask
from microturn.sessions.turn import SessionId

_TIMEOUT_S = 60.0


def wait_for_session(socket: Path, session_id: SessionId, **expected: object) -> None:
    """Until the engine has a session of this id, and these fields of it are so."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not any(expected.items() <= session.items() for session in _listed(socket, session_id)):
        assert time.monotonic() < deadline_s, (expected, _listed(socket, session_id))
        time.sleep(0.02)


def wait_until_gone(socket: Path, session_id: SessionId) -> None:
    """Until the engine has no session of this id any more."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while found := _listed(socket, session_id):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)


def listed(socket: Path, session_id: SessionId) -> dict[str, object] | None:
    """What the engine says of a session now; None when it has none of this id."""
    return next(iter(_listed(socket, session_id)), None)


def _listed(socket: Path, session_id: SessionId) -> list[dict[str, object]]:
    return [session for session in ask(socket, "list", _TIMEOUT_S) if session["id"] == session_id]
