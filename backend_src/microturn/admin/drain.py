"""Drains an engine: sessions go elsewhere one by one with their KV, while the others go on; the rest is saved last.

    0 ── one by one, those that rest: handed over with their KV ── 60 % ── ids and state of the others are saved ──▶
      ── their KV, the last active first ── 95 % ── timeout

A session goes to another server, else to the snapshot directory, else to another server without its KV. One whose turn
comes meanwhile has it wait for that, and is told to go elsewhere then. Were all refused first, their clients would take
them up elsewhere before their KV is there.

Sessions that do not rest before 60 %, or for which there is no time, are saved without KV first, so that none is lost.
Such a one continues after its KV has been recomputed. Where there are other servers it is offered to them first.

Without a directory a session that no server takes now would be lost: it is offered again, while there is time and there
are servers that may take it later. Until then it goes on here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial

from microturn.admin.final_save import WriteSpeed, add_kv, save_all
from microturn.admin.hand_over import hand_over, kv_if_readable, send_to_peer
from microturn.admin.peer_address import Address
from microturn.admin.peers import Peer, Peers
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.engine.moving import Held
from microturn.errors import DeadlineExceeded, FailedPrecondition, MicroturnError, Unavailable
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory, TakenUp
from microturn.snapshots.session_state import snapshot_of
from microturn.snapshots.snapshot import Snapshot

log = logging.getLogger(__name__)

_POLL_S = 0.02
# How long clients are told where their sessions live now. One whose stream just ends looks for its session elsewhere,
# and that has to be fetched from where it is.
_TELLING_S = 2.0
# How long it is relied on what other servers said of themselves.
_ASK_AGAIN_S = 1.0
# Shares of the timeout: for sessions that go one by one and for running turns, and when to stop writing KV.
_SHARE_OF_TURNS = 0.6
_SHARE_UNTIL_KV_ENDS = 0.95


@dataclass(frozen=True)
class Drained:
    """The result of a drain.

    Attributes:
        saved: number of saved sessions.
        failed: number of sessions that could not be saved.
        with_kv: number of sessions saved with their KV.
        moved: number of saved sessions that live on another server already.
    """

    saved: int
    failed: int
    with_kv: int
    moved: int = 0


def drain(engine: Engine, timeout_s: float, peers: Peers | None = None) -> Drained:
    """Hands every session over, or saves it, while those behind it go on, and stops the engine.

    Args:
        engine: runs in its own thread.
        timeout_s: of the whole drain.
        peers: the other servers; None if there are none.
    """
    begun_s = time.monotonic()
    turns_until_s, kv_until_s = (begun_s + share * timeout_s for share in (_SHARE_OF_TURNS, _SHARE_UNTIL_KV_ENDS))
    speed = WriteSpeed()
    others = None if peers is None else _Others(peers, engine.environment.model_fingerprint)
    to_peers = [] if others is None else [_ToPeers(engine, others), _ToPeers(engine, others, with_kv=False)]
    to_directory: list[_Way] = []
    if engine.snapshots is not None:
        to_directory.append(_ToDirectory(engine, engine.snapshots, speed, until_s=turns_until_s))
    ways: list[_Way] = [*to_peers[:1], *to_directory, *to_peers[1:]]
    may_take_later = others if engine.snapshots is None else None  # what stays is saved
    moved = _hand_over_all(engine, ways, may_take_later, until_s=turns_until_s) if ways else []
    engine.call(Maintenance.drain)
    while time.monotonic() < turns_until_s and engine.call(lambda sessions: sessions.is_busy):
        time.sleep(_POLL_S)
    resting = engine.call(Maintenance.quiesce)
    if to_peers and resting:
        moved += _hand_over_all(engine, [*to_peers], may_take_later, until_s=kv_until_s)
        resting = engine.call(Maintenance.quiesce)
    saved: list[tuple[Session, Snapshot]] = []
    num_with_kv = 0
    if engine.snapshots is not None:
        saved = save_all(engine.environment, engine.snapshots, resting, until_s=begun_s + timeout_s)
        num_with_kv = add_kv(engine, engine.snapshots, speed, saved, until_s=kv_until_s)
    num_elsewhere = sum(way.num_moved for way in to_peers)
    if num_elsewhere:
        time.sleep(max(0.0, min(_TELLING_S, begun_s + timeout_s - time.monotonic())))
    engine.call(Maintenance.stop)
    return Drained(len(moved) + len(saved), len(resting) - len(saved), sum(moved) + num_with_kv, num_elsewhere)


# Hands a session over; returns whether with its KV, or None if it had a turn, or has ended. Where it raises, the
# session goes on here: DeadlineExceeded is of this session, any other MicroturnError of all that would go this way.
_Way = Callable[[SessionId], bool | None]


def _hand_over_all(engine: Engine, ways: list[_Way], may_take_later: _Others | None, *, until_s: float) -> list[bool]:
    """Hands over sessions that rest, until none is left that may go, the time is over, or no way is.

    Args:
        engine: runs in its own thread.
        ways: tried one after the other.
        may_take_later: servers to which sessions are offered again that no way takes now; None for none.
        until_s: deadline by `time.monotonic`.

    Returns:
        Of each session that went, whether with its KV.
    """
    moved: list[bool] = []
    stay: set[SessionId] = set()
    # Each time longer: what is refused may have been sent with all its KV.
    pause_s = _ASK_AGAIN_S
    again_s = time.monotonic() + pause_s
    engine.call(Maintenance.leave)
    while ways and time.monotonic() < until_s:
        session_id = engine.call(partial(Maintenance.next_resting, but=stay))
        if session_id is None:
            may_go = bool(stay) and may_take_later is not None and may_take_later.may_change
            if not may_go and not engine.call(lambda sessions: sessions.is_busy):
                break
            time.sleep(_POLL_S)
            if may_go and time.monotonic() >= again_s:
                stay.clear()
                pause_s *= 2
                again_s = time.monotonic() + pause_s
            continue
        for way in list(ways):
            try:
                with_kv = way(session_id)
            except DeadlineExceeded as error:
                log.info("session %s: %s", session_id, error)
            except MicroturnError as error:
                log.warning("session %s, and those behind it, are not handed over %s: %s", session_id, way, error)
                ways.remove(way)
            except Exception:  # memory, or a device: the others may still go
                log.exception("session %s is not handed over %s", session_id, way)
            else:
                if with_kv is not None:
                    moved.append(with_kv)
                break
        else:
            stay.add(session_id)
    return moved


class _Others:
    """The other servers that take sessions now, by what they have said of themselves.

    Attributes:
        may_change: whether any may take later what none takes now; as of the last question.

    Args:
        peers: the other servers.
        model: fingerprint of it.
    """

    def __init__(self, peers: Peers, model: str) -> None:
        self.connect = peers.connect
        self.may_change = False
        self._peers = peers
        self._model = model
        self._taking: dict[Address, Peer] = {}
        self._asked_s = -math.inf

    def ask(self) -> None:
        """Asks them, unless that was just done."""
        if time.monotonic() >= self._asked_s + _ASK_AGAIN_S:
            self._taking = {peer.address: peer for peer in self._peers.others(self._model)}
            self.may_change = bool(self._taking) or self._peers.may_answer_later
            self._asked_s = time.monotonic()

    def emptiest(self, but: Container[Address]) -> Peer | None:
        """The emptiest one that is not full, other than those named; None if there is none."""
        taking = [peer for peer in self._taking.values() if peer.share < 1 and peer.address not in but]
        return min(taking, key=lambda peer: peer.share, default=None)

    def took_one(self, peer: Peer) -> None:
        self._taking[peer.address] = replace(peer, num_sessions=peer.num_sessions + 1)

    def takes_none(self, peer: Peer) -> None:
        del self._taking[peer.address]


class _ToPeers:
    """A way to other servers, by the network.

    Attributes:
        num_moved: sessions that went.

    Args:
        engine: runs in its own thread.
        others: the other servers.
        with_kv: otherwise KV is computed again there.
    """

    def __init__(self, engine: Engine, others: _Others, *, with_kv: bool = True) -> None:
        self._engine = engine
        self._others = others
        self._with_kv = with_kv
        self.num_moved = 0

    def __str__(self) -> str:
        return "to another server" + (" with KV" if self._with_kv else "")

    def __call__(self, session_id: SessionId) -> bool | None:
        self._others.ask()
        tried: set[Address] = set()
        while (peer := self._others.emptiest(but=tried)) is not None:
            tried.add(peer.address)
            try:
                with self._others.connect(peer.address) as connection:
                    sent = send_to_peer(self._engine, session_id, connection, with_kv=self._with_kv)
            except DeadlineExceeded:
                raise
            except Unavailable as error:  # it would not answer for the others either
                log.info("session %s: %s", session_id, error)
                self._others.takes_none(peer)
                continue
            except MicroturnError as error:  # it may take the next one: a tenant is full there, or its memory for now
                log.info("session %s: %s", session_id, error)
                continue
            self._others.took_one(peer)
            if sent is None:
                return None
            self.num_moved += 1
            return sent.kv_len > 0
        raise DeadlineExceeded("no other server takes it now")


class _ToDirectory:
    """A way by a file, which any server may take up.

    Args:
        engine: runs in its own thread.
        snapshots: where to.
        speed: of writing.
        until_s: deadline by `time.monotonic`.
    """

    def __init__(self, engine: Engine, snapshots: SnapshotDirectory, speed: WriteSpeed, *, until_s: float) -> None:
        self._engine = engine
        self._snapshots = snapshots
        self._speed = speed
        self._until_s = until_s

    def __str__(self) -> str:
        return "by the snapshot directory"

    def __call__(self, session_id: SessionId) -> bool | None:
        has_kv = False
        written: Session | None = None

        def write(held: Held) -> None:
            nonlocal has_kv, written
            copy, copying = held.copy, held.copying
            begun_s = time.monotonic()
            max_bytes = self._speed.bytes_until(self._until_s)
            kv = kv_if_readable(self._engine, copy.id, copying, max_bytes=max_bytes)
            if kv is None and copying is not None and copying.num_bytes > max_bytes:
                raise DeadlineExceeded(f"there is no time for {copying.num_bytes} bytes of KV")
            expires_s = self._snapshots.expires_s
            snapshot = snapshot_of(copy, self._engine.environment, epoch=copy.epoch, expires_s=expires_s)
            try:
                self._snapshots.save(snapshot, kv, until_s=self._until_s)
            except TakenUp as error:  # it goes on there
                log.info("%s", error)
                return
            except FailedPrecondition as error:  # it may have been written all the same
                raise Unavailable(error.args[0]) from error
            written = copy
            self._speed.note(kv, begun_s)
            has_kv = kv is not None

        try:
            has_gone = hand_over(self._engine, session_id, write)
        except Unavailable as error:  # a storage may answer the next time
            raise DeadlineExceeded(f"it cannot be saved now: {error.args[0]}") from error
        if has_gone is False and written is not None:  # it was closed
            self._snapshots.remove_ended(session_id, written.epoch, written.base_epoch)
        return has_kv if has_gone else None
