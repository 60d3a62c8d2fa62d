"""Turns whose deadline passes before they run."""

from __future__ import annotations

from microturn.errors import DeadlineExceeded
from microturn.sessions.turn import Turn


def check_time(turn: Turn, now_s: float) -> None:
    """Raises DeadlineExceeded where a turn's time has passed."""
    if turn.is_late(now_s):
        raise too_late()


def too_late() -> DeadlineExceeded:
    """What a turn ends with whose deadline passes before it runs."""
    return DeadlineExceeded("the turn's time passed while it waited: nothing was appended")
