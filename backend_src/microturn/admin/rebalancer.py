"""Evens out the sessions of a fleet: a server with more than its share hands some to the emptiest one.

Each server decides for itself, by what the others say of themselves. So that a newcomer is not flooded, a server moves
a bounded number a minute, one at a time, and only to a server that has less afterwards than this one had before.
"""

from __future__ import annotations

import logging
import math
import threading
from functools import partial

from microturn.admin.hand_over import send_to_peer
from microturn.admin.peers import SETTLED_S, Peer, Peers
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.engine.moving import Load
from microturn.errors import MicroturnError, Unavailable
from microturn.sessions.turn import SessionId

log = logging.getLogger(__name__)

# A server moves sessions while it has more than this multiple of its share, and at least a whole session more.
_TOLERANCE = 1.05
# How long nothing is moved after it has failed, or there was nothing to move.
_PAUSE_S = 2.0


class Rebalancer:
    """Moves sessions to emptier servers, on a thread of its own once it is started.

    Args:
        engine: runs in its own thread.
        peers: the other servers.
        moves_per_minute: at most; above 0.
    """

    def __init__(self, engine: Engine, peers: Peers, moves_per_minute: float) -> None:
        self._engine = engine
        self._peers = peers
        self._interval_s = 60.0 / moves_per_minute
        # Sessions that could not be moved: the next one may.
        self._refused: set[SessionId] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microturn-rebalancer", daemon=True)

    def start(self) -> None:
        """Moves sessions from now on."""
        self._thread.start()

    def close(self) -> None:
        """Moves no more."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = _PAUSE_S
        while not self._stopped.wait(pause_s):
            pause_s = self.look()

    def look(self) -> float:
        """Moves a session if this server has too many; returns after how many seconds to look again."""
        try:
            if self._move_one():
                return self._interval_s
        except Unavailable as error:  # also where the engine has stopped
            log.debug("no session is moved: %s", error)
        except MicroturnError as error:
            log.info("no session is moved: %s", error)
        except Exception:
            log.exception("no session is moved")
            return 60.0
        return max(_PAUSE_S, self._interval_s)

    def _move_one(self) -> bool:
        load = self._engine.call(lambda sessions: sessions.load)
        if load.is_leaving or load.num_sessions < 2:
            return False
        others = self._peers.others(self._engine.environment.model_fingerprint)
        if not others or others[0].age_s < SETTLED_S or not has_too_many(load, others):
            return False
        session_id = self._engine.call(partial(Maintenance.next_resting, but=self._refused))
        if session_id is None:
            self._refused.clear()
            return False
        self._refused.add(session_id)  # until all others have been tried
        with self._peers.connect(others[0].address) as connection:
            has_gone = send_to_peer(self._engine, session_id, connection) is not None
        self._refused.discard(session_id)
        return has_gone


def has_too_many(load: Load, others: list[Peer]) -> bool:
    """Whether a server should move a session to the emptiest of the others.

    Args:
        load: how much is on it.
        others: that take sessions, the emptiest first.
    """
    num_sessions = load.num_sessions + sum(peer.num_sessions for peer in others)
    max_sessions = load.max_sessions + sum(peer.max_sessions for peer in others)
    due = load.max_sessions * num_sessions / max_sessions
    emptiest = others[0]
    is_emptier = (emptiest.num_sessions + 1) / emptiest.max_sessions < load.num_sessions / load.max_sessions
    return is_emptier and load.num_sessions >= math.floor(max(_TOLERANCE * due, due + 0.5)) + 1
