"""Sinks that note when they were answered, by `time.perf_counter`."""

from __future__ import annotations

import threading
import time

from microturn.errors import MicroturnError
from microturn.sessions.turn import Status, TurnOutput


class Answer:
    """What a turn answers, and when.

    Attributes:
        tokens_s: when each of its tokens came.
        status: how it ended; None before, and where it failed.
        error: why it failed.
    """

    def __init__(self) -> None:
        self.tokens_s: list[float] = []
        self.status: Status | None = None
        self.error: MicroturnError | None = None
        self._has_ended = threading.Event()

    @property
    def end_s(self) -> float | None:
        """When its last token came; None while it has not ended, or where it failed."""
        return None if self.status is None else self.tokens_s[-1]

    def put(self, output: TurnOutput) -> None:
        now_s = time.perf_counter()
        self.tokens_s += [now_s] * len(output.token_ids)
        if output.status is not None:
            self.status = output.status
            self._has_ended.set()

    def fail(self, error: MicroturnError) -> None:
        self.error = error
        self._has_ended.set()

    def result(self) -> Status:
        """Waits for the end, of a turn that must not fail."""
        self._has_ended.wait()
        if self.error is not None:
            raise self.error
        assert self.status is not None
        return self.status
