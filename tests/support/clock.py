"""Time as tests have it."""

from __future__ import annotations


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
