"""Hands a session over: it is held, copied, written where it goes on, and ended here.

    goes on ── KV is copied and sent ahead ──▶ held ── the rest is sent ──▶ ended: its turns are told where it lives now
                                                │
                                                └── that fails ──▶ goes on here

Only what came while KV was sent ahead is copied and sent while the session's turns wait. A session with little KV is
sent at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from microturn.admin.kv import collect_kv, copy_kv
from microturn.admin.peer_connection import PeerConnection
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.engine.moving import Held, mark_of
from microturn.errors import DeadlineExceeded, FailedPrecondition, MicroturnError, Unavailable
from microturn.offload.copies import Copying, KVCopy
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from microturn.snapshots.session_state import snapshot_of

log = logging.getLogger(__name__)

# From here on KV is sent ahead: less than that takes a few milliseconds.
_AHEAD_BYTES = 4 << 20
_POLL_S = 0.005
# How long the turn may take that a session has when its KV has been sent ahead.
_PATIENCE_S = 1.0
# A snapshot on its way does not expire.
_TTL_S = 3600.0

# Writes a session that is held, and its KV; returns the route to it, if that is known.
Write = Callable[[Held], str | None]


def hand_over(engine: Engine, session_id: SessionId, write: Write, before: Copying | None = None) -> bool | None:
    """Holds a session while it is written elsewhere, and ends it here.

    Args:
        engine: runs in its own thread.
        session_id: of the session.
        write: see above; called in the caller's thread.
        before: a copy of its KV that was made before, see `KVCopies.begin`.

    Returns:
        Whether it went; None if it does not rest, or is not here.

    Raises:
        Exception: what `write` raises; the session goes on here.
    """
    held = engine.call(partial(Maintenance.hold, session_id=session_id, before=before))
    if held is None:
        return None
    try:
        route = write(held)
    except BaseException as error:
        # Where another server has refused it, there is no copy that could be out of date.
        is_refused = isinstance(error, MicroturnError) and not isinstance(error, Unavailable)
        engine.call(partial(Maintenance.let_go, copy=held.copy, has_copy=not is_refused))
        raise
    return engine.call(partial(Maintenance.hand_over, copy=held.copy, route=route))


@dataclass(frozen=True)
class Sent:
    """What went to another server.

    Attributes:
        session: the copy that lives there.
        kv_len: tokens whose KV went with it.
    """

    session: Session
    kv_len: int


def send_to_peer(engine: Engine, session_id: SessionId, peer: PeerConnection, *, with_kv: bool = True) -> Sent | None:
    """Hands a session over to another server.

    Args:
        engine: runs in its own thread.
        session_id: of the session.
        peer: a connection to the other server.
        with_kv: otherwise its KV is computed again there.

    Returns:
        What went; None if it has ended by itself.

    Raises:
        MicroturnError: the other server does not take it, or it had a turn all the time; it goes on here. Where no
            answer has come, the other server is asked to drop what it may have: it has gone if it had a turn there.
    """
    sent: Sent | None = None
    before = engine.call(partial(Maintenance.begin_copying, session_id=session_id)) if with_kv else None
    try:
        transfer = ""
        # What is in host memory or in a file is copied without the engine, while the session is held.
        if before is not None and before.held and before.num_bytes >= _AHEAD_BYTES:
            transfer = peer.send_ahead(copy_kv(engine, before))

        def write(held: Held) -> str | None:
            nonlocal sent
            copy = held.copy
            kv = kv_if_readable(engine, copy.id, held.copying, max_bytes=math.inf if with_kv else -1)
            expires_s = time.time() + _TTL_S
            snapshot = snapshot_of(copy, engine.environment, epoch=copy.epoch, expires_s=expires_s)
            sent = Sent(copy, 0 if kv is None else kv.state.kv_len)
            try:
                return peer.send(snapshot, kv, transfer, epoch_before=held.epoch_before)
            except Unavailable:
                goes_on_there, route = _drop(peer, copy)
                if goes_on_there:
                    return route
                raise

        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            has_gone = hand_over(engine, session_id, write, before if transfer else None)
            if has_gone is False and sent is not None:
                _drop(peer, sent.session)
            if has_gone is not None:
                return sent if has_gone else None
            if not engine.call(lambda sessions: sessions.lives(session_id)):
                return None
            time.sleep(_POLL_S)
    finally:
        if before is not None:
            engine.call(lambda sessions: sessions.copies.end(before))
    raise DeadlineExceeded(f"session '{session_id}' had a turn for {_PATIENCE_S:g} s")


def _drop(peer: PeerConnection, copy: Session) -> tuple[bool, str | None]:
    """Asks another server to end what it was sent, if it has it: nobody else would, before its idle time has passed.

    Returns:
        See `PeerConnection.drop`; that it does not go on there where there is no answer.
    """
    try:
        return peer.drop(copy.id, mark_of(copy)._replace(base_epoch=copy.epoch))
    except MicroturnError as error:
        log.info("session %s may have a copy elsewhere: %s", copy.id, error)
        return False, None


def kv_if_readable(
    engine: Engine, session_id: SessionId, copying: Copying | None, *, max_bytes: float = math.inf
) -> KVCopy | None:
    """A session's KV; None if it has none, none that can be read, or more than `max_bytes`."""
    try:
        return collect_kv(engine, session_id, copying, max_bytes=max_bytes)
    except FailedPrecondition as error:
        log.warning("session %s goes without its KV: %s", session_id, error)
        return None
