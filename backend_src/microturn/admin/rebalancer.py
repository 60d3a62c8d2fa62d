"""Evens out the sessions of a fleet: a server with more than others hands some to one that has less.

    every two seconds: what have eight of the others? ──▶ the emptiest has a tenth less, and this one its share or more
      ──▶ a session goes there, and is taken if that still has so few, with all that are on their way

Each server decides for itself. It asks few, drawn by chance: so of the others eight find a newcomer at a time, however
many there are, and a newcomer is not flooded. The newcomer alone knows what comes to it, and has the last word. What it
is compared with is this server and not the mean: many servers together have room for one more newcomer without any of
them having noticeably more than the mean. A session that has been handed over stays for a minute.
"""

from __future__ import annotations

import logging
import math
import threading
from functools import partial

from microturn.admin.hand_over import send_to_peer
from microturn.admin.peer_address import Address
from microturn.admin.peers import SETTLED_S, Peer, Peers
from microturn.admin.received import Receiver
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.engine.moving import Load
from microturn.errors import DeadlineExceeded, MicroturnError, Unavailable
from microturn.sessions.turn import SessionId

log = logging.getLogger(__name__)

# Servers that are asked at a look: an empty one gets about half as many sessions a second.
NUM_ASKED = 8
# A server is given sessions while it has so much less than who gives, and at least a whole session less.
TOLERANCE = 0.1
# How long nothing is moved after it has failed, or there was nothing to move.
PAUSE_S = 2.0


class Rebalancer:
    """Moves sessions to emptier servers, on a thread of its own once it is started.

    Args:
        engine: runs in its own thread.
        peers: the other servers.
        receiver: knows which sessions have just come.
        moves_per_minute: at most; above 0.
    """

    def __init__(self, engine: Engine, peers: Peers, receiver: Receiver, moves_per_minute: float) -> None:
        self._engine = engine
        self._peers = peers
        self._receiver = receiver
        self._interval_s = 60.0 / moves_per_minute
        # Sessions that could not be moved, and servers that did not take one: another may, until all have been tried.
        self._refused: set[SessionId] = set()
        self._avoided: set[Address] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microturn-rebalancer", daemon=True)

    def start(self) -> None:
        """Moves sessions from now on."""
        self._thread.start()

    def close(self) -> None:
        """Moves no more."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = PAUSE_S
        while not self._stopped.wait(pause_s):
            pause_s = self.look()

    def look(self) -> float:
        """Moves a session if this server has too many; returns after how many seconds to look again."""
        try:
            return self._interval_s if self._move_one() else PAUSE_S
        except Unavailable as error:  # also where the engine has stopped
            log.debug("no session is moved: %s", error)
        except MicroturnError as error:
            log.info("no session is moved: %s", error)
        except Exception:
            log.exception("no session is moved")
            return 60.0
        return max(PAUSE_S, self._interval_s)

    def _move_one(self) -> bool:
        load = self._engine.call(lambda sessions: sessions.load)
        if load.is_leaving or load.num_sessions < 2:
            return False
        others = self._peers.others(self._engine.environment.model_fingerprint, most=NUM_ASKED)
        others = [peer for peer in others if peer.age_s >= SETTLED_S and peer.address not in self._avoided]
        enough = enough_for(load, others)
        session_id = None
        if enough:
            but = self._refused | self._receiver.came_lately()
            session_id = self._engine.call(partial(Maintenance.next_resting, but=but))
        if session_id is None:
            self._refused.clear()
            self._avoided.clear()
            return False
        target = others[0].address
        self._refused.add(session_id)
        self._avoided.add(target)
        try:
            with self._peers.connect(target, enough) as connection:
                has_gone = send_to_peer(self._engine, session_id, connection) is not None
        except DeadlineExceeded:  # it had a turn all the time
            self._avoided.discard(target)
            raise
        self._refused.discard(session_id)
        self._avoided.discard(target)
        return has_gone


def enough_for(load: Load, others: list[Peer]) -> int:
    """The number of sessions with which the emptiest other server needs no more from this one; 0 if it needs none.

    Args:
        load: how much is on this server.
        others: that take sessions, the emptiest first.
    """
    if not others:
        return 0
    num_sessions = load.num_sessions + sum(peer.num_sessions for peer in others)
    max_sessions = load.max_sessions + sum(peer.max_sessions for peer in others)
    if load.num_sessions * max_sessions < num_sessions * load.max_sessions:
        return 0  # others have more to give
    emptiest = others[0]
    as_full = load.num_sessions * emptiest.max_sessions / load.max_sessions
    enough = math.ceil(min(as_full - 1, (1 - TOLERANCE) * as_full))
    return enough if emptiest.num_sessions < enough else 0
