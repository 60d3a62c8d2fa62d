"""Sessions whose last forward pass failed, and when one has failed too often."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from microturn.errors import InternalError
from microturn.sessions.session import Session

MAX_FAILURES = 3


class Suspects:
    """Sessions whose last forward pass failed.

    A pass that fails does not tell which of its sessions is at fault. So each of them computes alone until a pass of
    its own succeeds: the others are cleared, and only the one at fault fails again and again.

    Attributes:
        is_empty: whether there surely is none, as nearly always: each row of each step asks.
    """

    def __init__(self) -> None:
        self._num_failures: WeakKeyDictionary[Session, int] = WeakKeyDictionary()
        self.is_empty = True

    def __contains__(self, session: object) -> bool:
        return not self.is_empty and session in self._num_failures

    def blame(self, session: Session) -> bool:
        """Notes that a pass of a session has failed; returns whether it is one too many."""
        self.is_empty = False
        self._num_failures[session] = self._num_failures.get(session, 0) + 1
        return self._num_failures[session] >= MAX_FAILURES

    def clear(self, session: Session) -> None:
        """Notes that a pass of a session has succeeded."""
        self._num_failures.pop(session, None)
        self.is_empty = not self._num_failures


def given_up(error: Exception) -> InternalError:
    """What a session's turns are told whose passes have failed too often."""
    return InternalError(
        f"the forward pass failed for this session {MAX_FAILURES} times in a row, and the session was closed: open a "
        f"new one with START: {error}"
    )
