"""One thread per synchronous client that wakes its sessions when something is due. Each session knows what."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microturn_client._sync_session import Session


log = logging.getLogger(__name__)


class TimerThread:
    """Holds sessions weakly: one that its user dropped is left to its idle time."""

    def __init__(self) -> None:
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._wake_at = math.inf
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def watch(self, session: Session) -> None:
        """Adds a session; the first one starts the thread."""
        with self._changed:
            self._sessions.add(session)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="microturn-timer", daemon=True)
                self._thread.start()

    def sessions(self) -> list[Session]:
        """The sessions that somebody still holds."""
        with self._changed:
            return list(self._sessions)

    def wake_at(self, time_s: float) -> None:
        """Looks after the sessions at this monotonic time at the latest."""
        with self._changed:
            if time_s < self._wake_at:
                self._wake_at = time_s
                self._changed.notify()

    def stop(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while self._wait():
            self._look_after_sessions()

    def _look_after_sessions(self) -> None:
        # A frame of its own, so that while waiting nothing here holds what a user has dropped.
        for session in self.sessions():
            try:
                next_s = session._stream.tick()
            except Exception:  # the others' keep-alives must go on
                log.exception("the timer of session %s failed", session.id)
                continue
            if next_s is not None:
                self.wake_at(next_s)

    def _wait(self) -> bool:
        with self._changed:
            while not self._is_stopped and (remaining_s := self._wake_at - time.monotonic()) > 0:
                self._changed.wait(min(remaining_s, threading.TIMEOUT_MAX))
            self._wake_at = math.inf
            return not self._is_stopped
