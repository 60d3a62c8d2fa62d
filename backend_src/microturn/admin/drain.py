"""Drains an engine: sessions go elsewhere one by one with their KV, while the others go on; the rest is saved last.

    0 ── one by one, those that rest: saved with their KV, and ended ── 60 % ── ids and state of the others ──▶
      ── their KV, the last active first ── 95 % ── timeout

A session whose turn comes while it is saved waits for that, and is told to go elsewhere then. Were all refused first,
their clients would take them up elsewhere before their KV is there.

Sessions that do not rest before 60 %, or for which there is no time, are saved without KV first, so that none is lost.
Such a one continues after its KV has been recomputed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from microturn.admin.kv import collect_kv
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import DeadlineExceeded, FailedPrecondition, MicroturnError
from microturn.offload.copies import Copying, KVCopy
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.session_state import snapshot_of
from microturn.snapshots.snapshot import Snapshot

log = logging.getLogger(__name__)

_POLL_S = 0.02
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
    """

    saved: int
    failed: int
    with_kv: int


def drain(engine: Engine, timeout_s: float) -> Drained:
    """Saves every session to the snapshot directory while those behind it go on, and stops the engine.

    Args:
        engine: runs in its own thread.
        timeout_s: of the whole drain.
    """
    begun_s = time.monotonic()
    turns_until_s = begun_s + _SHARE_OF_TURNS * timeout_s
    speed = _WriteSpeed()
    moved: list[bool] = []
    if engine.snapshots is not None:
        moved = _hand_over_all(engine, engine.snapshots, speed, until_s=turns_until_s)
    engine.call(Maintenance.drain)
    while time.monotonic() < turns_until_s and engine.call(lambda sessions: sessions.is_busy):
        time.sleep(_POLL_S)
    resting = engine.call(Maintenance.quiesce)
    saved: list[tuple[Session, Snapshot]] = []
    num_with_kv = 0
    if engine.snapshots is not None:
        saved = _save(engine, engine.snapshots, resting, until_s=begun_s + timeout_s)
        until_s = begun_s + _SHARE_UNTIL_KV_ENDS * timeout_s
        num_with_kv = _save_kv(engine, engine.snapshots, speed, saved, until_s=until_s)
    engine.call(Maintenance.stop)
    return Drained(len(moved) + len(saved), len(resting) - len(saved), sum(moved) + num_with_kv)


def _hand_over_all(engine: Engine, snapshots: SnapshotDirectory, speed: _WriteSpeed, *, until_s: float) -> list[bool]:
    """Saves sessions that rest and ends them here, until none is left, the time is over, or the disk takes no more.

    Returns:
        Of each session that went, whether with its KV.
    """
    moved: list[bool] = []
    stay: set[SessionId] = set()
    engine.call(Maintenance.leave)
    while time.monotonic() < until_s:
        try:
            held = engine.call(partial(Maintenance.hold_next, but=stay))
        except Exception:  # no memory for a copy: the tokens of all can still be saved
            log.exception("no further session is handed over")
            break
        if held is None:
            if not engine.call(lambda sessions: sessions.is_busy):
                break
            time.sleep(_POLL_S)
            continue
        copy, copying = held
        begun_s, is_last = time.monotonic(), False
        try:
            kv = _kv_in_time(engine, copy.id, copying, max_bytes=speed.bytes_until(until_s))
            snapshot = snapshot_of(copy, engine.environment, epoch=copy.epoch, expires_s=snapshots.expires_s)
            snapshots.save(snapshot, kv, until_s=until_s)
            speed.note(kv, begun_s)
        except DeadlineExceeded as error:
            log.info("session %s is saved last: %s", copy.id, error)
        except MicroturnError as error:
            log.warning("session %s, and those behind it, are not handed over one by one: %s", copy.id, error)
            is_last = True
        except Exception:  # memory, or a device: the others may still be saved
            log.exception("session %s is not handed over", copy.id)
        else:
            if engine.call(partial(Maintenance.hand_over, copy=copy)):
                moved.append(kv is not None)
            else:
                snapshots.remove(copy.id)  # it was closed
            continue
        stay.add(copy.id)
        engine.call(partial(Maintenance.let_go, session_id=copy.id))
        if is_last:
            break
    return moved


class _WriteSpeed:
    """How fast KV is written, by large pieces: of small ones it says how long a file takes."""

    _LARGE = 64 << 20

    def __init__(self) -> None:
        self._num_bytes, self._took_s = 0, 0.0

    def bytes_until(self, until_s: float) -> float:
        """What can be written in time; no limit before anything is known."""
        return self._num_bytes / self._took_s * (until_s - time.monotonic()) if self._num_bytes else math.inf

    def note(self, kv: KVCopy | None, begun_s: float) -> None:
        """KV has been written, if there was any, since this time by `time.monotonic`."""
        if kv is not None and kv.pages.num_bytes >= self._LARGE:
            self._num_bytes += kv.pages.num_bytes
            self._took_s += time.monotonic() - begun_s


def _kv_in_time(engine: Engine, session_id: SessionId, copying: Copying | None, *, max_bytes: float) -> KVCopy | None:
    """A session's KV; None if it has none that can be read.

    Raises:
        DeadlineExceeded: it has more than `max_bytes`.
    """
    try:
        kv = collect_kv(engine, session_id, copying, max_bytes=max_bytes)
    except FailedPrecondition as error:
        log.warning("session %s is saved without its KV: %s", session_id, error)
        return None
    if kv is None and copying is not None:
        raise DeadlineExceeded(f"there is no time for {copying.num_bytes} bytes of KV")
    return kv


def _save(
    engine: Engine, snapshots: SnapshotDirectory, resting: Sequence[Session], *, until_s: float
) -> list[tuple[Session, Snapshot]]:
    """Saves sessions without their KV, and returns the saved ones."""
    saved = []
    for number, session in enumerate(resting):
        if time.monotonic() > until_s:
            log.error("no time is left to save %d sessions", len(resting) - number)
            break
        snapshot = snapshot_of(session, engine.environment, epoch=session.epoch, expires_s=snapshots.expires_s)
        try:
            snapshots.save(snapshot)
        except MicroturnError as error:
            log.error("session %s is lost: %s", session.id, error)
        else:
            saved.append((session, snapshot))
    return saved


def _save_kv(
    engine: Engine,
    snapshots: SnapshotDirectory,
    speed: _WriteSpeed,
    saved: Sequence[tuple[Session, Snapshot]],
    *,
    until_s: float,
) -> int:
    """Adds the KV of sessions to their snapshots, as far as the measured write speed allows in time."""
    num_saved = 0
    for session, snapshot in sorted(saved, key=lambda one: one[0].last_activity_s, reverse=True):
        begun_s = time.monotonic()
        if begun_s >= until_s:
            break
        try:
            copying = engine.call(partial(Maintenance.begin_copying, session_id=session.id))
            kv = collect_kv(engine, session.id, copying, max_bytes=speed.bytes_until(until_s))
            if kv is None:
                continue
            num_saved += snapshots.add_kv(snapshot, kv, until_s=until_s)
        except FailedPrecondition as error:
            log.warning("session %s is saved without its KV: %s", session.id, error)
        except MicroturnError as error:
            log.warning("session %s, and those that were active before it, is saved without KV: %s", session.id, error)
            break
        else:
            speed.note(kv, begun_s)
    return num_saved
