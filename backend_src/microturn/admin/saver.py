"""Saves sessions while they go on, so that one whose server dies goes on elsewhere from what was saved last.

Every so often each session that has had a turn since is saved, with the KV that has come since. Its client tells the
server that takes it up what came behind that. The snapshot of a session that ends is removed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from microturn.admin.hand_over import kv_if_readable
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.engine.moving import Mark
from microturn.errors import MicroturnError, Unavailable
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.kv_files import MAX_FILES, KVFiles
from microturn.snapshots.session_state import snapshot_of

log = logging.getLogger(__name__)

_TICK_S = 0.2
# Sessions that are saved side by side: a bucket takes nine requests for each, of tens of milliseconds.
# The KV of so many is in memory at a time.
_NUM_THREADS = 4
# After a session could not be saved, the disk being full for example.
_PAUSE_S = 10.0


@dataclass(frozen=True)
class _Saved:
    """What was saved last of a session."""

    mark: Mark
    files: KVFiles | None


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
        self._ended: queue.SimpleQueue[tuple[SessionId, int | None]] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microturn-saver", daemon=True)
        engine.watch_sessions(self)
        self._thread.start()

    def session_opened(self, session: Session) -> None:
        """Nothing: it is saved when it has had a turn."""

    def session_ended(self, session: Session, reason: str) -> None:
        # One that was moved may be in the directory, for whoever takes it up.
        self._ended.put((session.id, None if reason == "moved" else session.epoch))

    def close(self) -> None:
        """Saves no more, and waits for what is being saved."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        next_s = time.monotonic() + self._every_s
        while not self._stopped.wait(_TICK_S):
            try:
                self._forget_ended()
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + self._every_s
                    self._save_all()
            except Unavailable:  # the engine has stopped
                return
            except MicroturnError as error:
                log.error("sessions are not saved for %g s: %s", _PAUSE_S, error)
                next_s = time.monotonic() + _PAUSE_S
            except Exception:
                log.exception("sessions are not saved for %g s", _PAUSE_S)
                next_s = time.monotonic() + _PAUSE_S

    def _forget_ended(self) -> None:
        while not self._ended.empty():
            session_id, epoch = self._ended.get()
            self._saved.pop(session_id, None)
            if epoch is not None:
                self._snapshots.remove(session_id, up_to=epoch)

    def _save_all(self) -> None:
        marks = {session_id: saved.mark for session_id, saved in self._saved.items()}
        changed = self._engine.call(partial(Maintenance.changed, marks=marks))
        with ThreadPoolExecutor(_NUM_THREADS, "microturn-saver") as threads:
            for _ in threads.map(self._save, changed):  # with the first error those that wait are given up
                pass

    def _save(self, session_id: SessionId) -> None:
        if self._stopped.is_set():
            return
        # What is not saved well is saved whole the next time.
        last = self._saved.pop(session_id, None)
        files = None if last is None or last.files is None or len(last.files.files) >= MAX_FILES else last.files
        before = None if files is None else files.state
        saving = self._engine.call(partial(Maintenance.begin_saving, session_id=session_id, before=before))
        if saving is None:
            return
        kv = kv_if_readable(self._engine, session_id, saving.copying)
        if not self._engine.call(lambda sessions: sessions.lives(session_id)):
            return  # it may be saved elsewhere by now
        copy, expires_s = saving.copy, self._snapshots.expires_s
        snapshot = snapshot_of(copy, self._engine.environment, epoch=copy.epoch, expires_s=expires_s)
        self._saved[session_id] = _Saved(saving.mark, self._snapshots.save_next(snapshot, kv, files))
