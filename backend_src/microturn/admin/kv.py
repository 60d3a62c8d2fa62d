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
        _copy(engine, copying)
    finally:
        if copying.is_open:
            engine.call(lambda sessions: sessions.copies.end(copying))
    try:
        return engine.copies.finish(copying)
    except (OSError, DamagedFile) as error:
        raise FailedPrecondition(f"the KV of session '{session_id}' cannot be read, try again: {error}") from error


def copy_kv(engine: Engine, copying: Copying) -> KVCopy:
    """The KV of a copy from the pool, once it is complete. The copy goes on sharing its pages: the caller ends it."""
    _copy(engine, copying)
    return engine.copies.finish(copying)


def _copy(engine: Engine, copying: Copying) -> None:
    while not copying.is_complete:
        copying.settle()
        engine.call(lambda sessions: sessions.copies.advance(copying))
