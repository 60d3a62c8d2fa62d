"""The KV of a session for a file: copied between the engine's steps, read from files in the thread of who asks."""

from __future__ import annotations

import math

from microturn.engine import Engine
from microturn.errors import FailedPrecondition
from microturn.tiers.copies import Copying, KVCopy
from microturn.tiers.image_file import DamagedFile
from microturn.turn import SessionId


def collect_kv(
    engine: Engine, session_id: SessionId, copying: Copying | None, *, max_bytes: float = math.inf
) -> KVCopy | None:
    """Waits until KV has been copied, as of when the copying began; None when there is none, or more than is wanted.

    Args:
        engine: runs in a thread of its own.
        session_id: whose KV it is.
        copying: what `Housekeeping.begin_copying` returned.
        max_bytes: how much is wanted at most.

    Raises:
        FailedPrecondition: it was in a file, and could not be read.
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
