"""Saves sessions while they go on, so that one whose server dies goes on elsewhere from what was saved last.

Every so often each session that has had a turn since is saved, with the KV that has come since. Its client tells the
server that takes it up what came behind that. The snapshot of a session that ends is removed.

A session that cannot be saved does not keep the others from it: those whose last try is longest ago are first.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

from microturn.admin.hand_over import kv_if_readable
from microturn.engine.engine import Engine
from microturn.engine.moving import Mark
from microturn.errors import DeadlineExceeded, MicroturnError, ResourceExhausted, Unavailable
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory, TakenUp
from microturn.snapshots.kv_files import MAX_FILES, KVFiles
from microturn.snapshots.session_state import snapshot_of

log = logging.getLogger(__name__)

_TICK_S = 0.2
# Sessions that are saved side by side: a bucket takes ten requests for each, of tens of milliseconds.
# The KV of so many is in memory at a time.
_NUM_THREADS = 4
# After nothing could be saved, the disk being full for example, or removed.
_PAUSE_S = 10.0
# A round is given up when so many sessions in a row could not be saved: each try may take until a bucket's timeout.
_MAX_FAILURES = 8
# How long `close` waits for what is being written.
_CLOSE_S = 5.0


@dataclass(frozen=True)
class _Saved:
    """What was saved last of a session.

    Attributes:
        mark: of the point that was saved.
        files: with its KV.
    """

    mark: Mark
    files: KVFiles | None


@dataclass(frozen=True)
class _Ended:
    """A session that is not here any more.

    Attributes:
        session_id: of the session.
        epoch: that it had at last.
        base_epoch: see `Session`.
        is_over: whether it goes on nowhere, so that what is saved of it is removed.
    """

    session_id: SessionId
    epoch: int
    base_epoch: int
    is_over: bool


class Saver:
    """Saves sessions, on threads of its own; a `SessionWatcher`.

    Args:
        engine: runs in its own thread, and has not yet had a turn.
        snapshots: where to.
        every_s: between two rounds; one that takes longer is followed by the next.
    """

    def __init__(self, engine: Engine, snapshots: SnapshotDirectory, every_s: float) -> None:
        self._engine = engine
        self._snapshots = snapshots
        self._every_s = every_s
        self._saved: dict[SessionId, _Saved] = {}
        self._tried_s: dict[SessionId, float] = {}
        self._ended: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._forget_again_s = -math.inf
        self._saving = threading.Lock()
        self._stopped = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microturn-saver", daemon=True)
        engine.watch_sessions(self)
        self._thread.start()

    def session_opened(self, session: Session) -> None:
        pass

    def session_ended(self, session: Session, reason: str) -> None:
        # One that was moved may be in the directory, for whoever takes it up.
        self._ended.put(_Ended(session.id, session.epoch, session.base_epoch, is_over=reason != "moved"))

    def stop(self, within_s: float) -> None:
        """Saves no more; what is saved of sessions that end is still removed.

        Args:
            within_s: how long to wait for what is being saved. A storage that hangs may write it later.
        """
        self._stopped.set()
        if self._saving.acquire(timeout=within_s):
            self._saving.release()

    def close(self) -> None:
        """Ends the thread, unless its storage hangs."""
        self.stop(0)
        self._closed.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        next_s = time.monotonic() + self._every_s
        while not self._closed.wait(_TICK_S):
            try:
                self._forget_ended()
                if time.monotonic() >= next_s and not self._stopped.is_set():
                    next_s = time.monotonic() + self._every_s
                    if not self._save_all():
                        next_s = time.monotonic() + _PAUSE_S
            except Unavailable:  # the engine has stopped
                break
            except Exception:
                log.exception("sessions are not saved for %g s", _PAUSE_S)
                next_s = time.monotonic() + _PAUSE_S
        self._forget_ended()

    def _forget_ended(self) -> None:
        if time.monotonic() < self._forget_again_s:
            return
        while not self._ended.empty():
            ended = self._ended.get()
            self._saved.pop(ended.session_id, None)
            self._tried_s.pop(ended.session_id, None)
            try:
                if ended.is_over:
                    self._snapshots.remove_ended(ended.session_id, ended.epoch, ended.base_epoch)
            except OSError as error:
                log.error("what is saved of session %s is removed later: %s", ended.session_id, error)
                self._ended.put(ended)
                self._forget_again_s = time.monotonic() + _PAUSE_S
                return

    def _save_all(self) -> bool:
        """Saves the sessions that have changed; False if some could not be saved, and none could."""
        errors: list[BaseException] = []
        num_saved = num_in_row = 0
        with self._saving, ThreadPoolExecutor(_NUM_THREADS, "microturn-saver") as threads:
            marks = {session_id: saved.mark for session_id, saved in self._saved.items()}
            changed = self._engine.call(lambda sessions: sessions.changed(marks))
            changed.sort(key=lambda session_id: self._tried_s.get(session_id, -math.inf))
            for done in as_completed([threads.submit(self._save, session_id) for session_id in changed]):
                error = done.exception()
                if isinstance(error, Unavailable):
                    raise error
                if error is not None:
                    errors.append(error)
                    num_in_row += 1
                elif done.result():
                    num_saved += 1
                    num_in_row = 0
                if num_in_row == _MAX_FAILURES:
                    threads.shutdown(cancel_futures=True)
                    break
        if errors:
            is_expected = isinstance(errors[0], MicroturnError | OSError)
            log.error(
                "%d of %d sessions were saved, and %d could not be: %s",
                *(num_saved, len(changed), len(errors), errors[0]),
                exc_info=None if is_expected else errors[0],
            )
        return num_saved > 0 or not errors

    def _save(self, session_id: SessionId) -> bool:
        """Saves a session; returns whether that was necessary."""
        if self._stopped.is_set():
            return False
        self._tried_s[session_id] = time.monotonic()
        # What is not saved well is saved whole the next time.
        last = self._saved.pop(session_id, None)
        files = None if last is None or last.files is None or len(last.files.files) >= MAX_FILES else last.files
        mark, state = None if last is None else last.mark, None if files is None else files.state
        saving = self._engine.call(lambda sessions: sessions.begin_saving(session_id, mark, state))
        if saving is None:
            return False
        kv = kv_if_readable(self._engine, session_id, saving.copying)
        if not self._engine.call(lambda sessions: sessions.lives(session_id)):
            return False  # it may be saved elsewhere by now
        copy, expires_s = saving.copy, self._snapshots.expires_s
        snapshot = snapshot_of(copy, self._engine.environment, epoch=copy.epoch, expires_s=expires_s)
        save = partial(self._snapshots.save_next, snapshot, is_wanted=self._may_save)
        try:
            try:
                files = save(kv, files)
            except ResourceExhausted as error:
                if kv is None:
                    raise
                log.warning("session %s is saved without its KV: %s", session_id, error)
                files = save(None, None)
        except TakenUp as error:  # its client is there: until there is a turn here it is not tried again
            log.info("%s", error)
            self._saved[session_id] = _Saved(saving.mark, None)
            return False
        except DeadlineExceeded:  # this server stops
            return False
        self._saved[session_id] = _Saved(saving.mark, files)
        return True

    def _may_save(self) -> bool:
        return not self._stopped.is_set()
