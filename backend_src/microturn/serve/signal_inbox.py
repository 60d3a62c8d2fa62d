"""Signals that one thread waits for, in the order of their arrival.

The kernel may deliver a signal to any thread, also to one that a library has started. It always wakes the thread that
waits here, and no handler of ours interrupts other code.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterable
from types import FrameType


class SignalInbox:
    """Handles some signals of this process for its whole life. Create it once, in the main thread.

    Args:
        signals: the signals to wait for.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._inbox, self._outbox = socket.socketpair()
        self._inbox.setblocking(False)
        self._outbox.setblocking(False)
        signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, _leave_it_to_the_inbox)

    def wait(self, timeout_s: float) -> frozenset[int]:
        """Waits for a signal and returns all that have arrived; none after the timeout."""
        if not select.select([self._inbox], [], [], timeout_s)[0]:
            return frozenset()
        return frozenset(self._inbox.recv(4096))


def _leave_it_to_the_inbox(number: int, frame: FrameType | None) -> None:
    """Python wrote the signal's number into the inbox before it called this."""
