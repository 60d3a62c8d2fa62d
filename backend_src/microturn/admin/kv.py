"""Collects a session's KV for a file: copied between the engine's steps, or read from a file in the caller's thread."""

from __future__ import annotations

import math

from microturn.engine.engine import Engine
from microturn.errors import FailedPrecondition
from microturn.offload.copies import Copying, KVCopy
from microturn.offload.image_file import DamagedFile
from microturn.sessions.turn import SessionId


def collect_kv(
    engine: Engine, session_id: SessionId, copying: Copying | None, *, max_bytes: float = math.inf
) -> KVCopy | None:
    """Waits until KV has been copied, as of when the copy began; None if there is none, or more than `max_bytes`.

    Args:
        engine: runs in its own thread.
        session_id: of the session.
        copying: what `Maintenance.begin_copying` returned.
        max_bytes: limit of the KV.

    Raises:
        FailedPrecondition: it was in a file that could not be read.
        Unavailable: the engine has stopped.
    """
    if copying is None:
        return None
    try:
        if copying.num_bytes > max_bytes:
            return None
        while not engine.call(lambda sessions: sessions.copies.advance(copying)):
            copying.settle()
    finally:
        engine.call(lambda sessions: sessions.copies.end(copying))
    try:
        return engine.copies.finish(copying)
    except (OSError, DamagedFile) as error:
        raise FailedPrecondition(f"the KV of session '{session_id}' cannot be read, try again: {error}") from error
