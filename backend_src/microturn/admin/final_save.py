"""Saves the sessions that are left when a server stops: all without their KV first, so that none is lost, then KV."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from microturn.admin.kv import collect_kv
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import FailedPrecondition, MicroturnError, Unavailable
from microturn.offload.background import BackgroundThreads
from microturn.offload.copies import KVCopy
from microturn.offload.file_thread import Outcome
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.session import Session
from microturn.snapshots.directory import SnapshotDirectory, TakenUp
from microturn.snapshots.session_state import snapshot_of
from microturn.snapshots.snapshot import Snapshot

log = logging.getLogger(__name__)

# Sessions that are saved side by side: a bucket takes six requests for each, of tens of milliseconds.
_NUM_THREADS = 16
# Before what a storage has refused is tried again.
_PAUSE_S = 0.2


class WriteSpeed:
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


def save_all(
    environment: SessionEnvironment, snapshots: SnapshotDirectory, resting: Sequence[Session], *, until_s: float
) -> list[tuple[Session, Snapshot]]:
    """Saves sessions without their KV; what a storage refuses is tried again, unless it has no room.

    Args:
        environment: of the sessions.
        snapshots: where to.
        resting: the sessions.
        until_s: deadline by `time.monotonic`. A storage that hangs may write later.

    Returns:
        The saved ones, with what was saved, in the order of `resting`; also those that go on elsewhere already.
    """

    def save(session: Session) -> Snapshot:
        snapshot = snapshot_of(session, environment, epoch=session.epoch, expires_s=snapshots.expires_s)
        try:
            snapshots.save(snapshot)
        except TakenUp as error:  # it goes on there
            log.info("%s", error)
        return snapshot

    ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    threads = BackgroundThreads(ended.put, name="microturn-drain", num_threads=_NUM_THREADS)
    outcomes: dict[Session, Outcome[Snapshot]] = {}
    left = list(resting)
    while left:
        for session in left:
            threads.submit(partial(save, session), partial(outcomes.__setitem__, session))
        with suppress(queue.Empty):
            for _ in left:
                ended.get(timeout=max(0.0, until_s - time.monotonic()))()
        left = [session for session in left if session not in outcomes or _may_pass(outcomes[session].error)]
        if time.monotonic() + _PAUSE_S >= until_s:
            break
        if left:
            time.sleep(_PAUSE_S)
    threads.close()
    for session, outcome in outcomes.items():
        if outcome.error is not None:
            log.error("session %s is lost: %s", session.id, outcome.error)
    if len(outcomes) < len(resting):
        log.error("no time is left to save %d sessions", len(resting) - len(outcomes))
    saved = [(session, outcomes[session].value) for session in resting if session in outcomes]
    return [(session, snapshot) for session, snapshot in saved if snapshot is not None]


def _may_pass(error: Exception | None) -> bool:
    """Whether what could not be saved may be saved a little later: a bucket refuses for a second, a disk is busy."""
    return isinstance(error, FailedPrecondition | Unavailable)


def add_kv(
    engine: Engine,
    snapshots: SnapshotDirectory,
    speed: WriteSpeed,
    saved: Sequence[tuple[Session, Snapshot]],
    *,
    until_s: float,
) -> int:
    """Adds the KV of sessions to their snapshots, as far as the measured write speed allows in time.

    Args:
        engine: has the sessions.
        snapshots: where they are saved.
        speed: of writing.
        saved: the sessions, with what was saved of them.
        until_s: deadline by `time.monotonic`.

    Returns:
        The number of sessions whose KV was added.
    """
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
