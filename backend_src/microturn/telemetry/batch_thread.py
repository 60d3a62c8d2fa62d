"""A thread that hands things on, many at a time: who puts something in never waits, and seldom wakes it.

A thread that woke for each would take Python's lock from the engine's just as often.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BatchThread(Generic[Item]):
    """Collects for a moment, then hands on what there is, in its order.

    Args:
        name: of the thread.
        hand_on: takes them, at least one; it runs in the thread and raises nothing.
        pause_s: for how long is collected.
        max_waiting: what does not fit is lost, and counted.
        max_at_once: taken together.

    Attributes:
        num_dropped: how many were lost; `hand_on` may add its own.
        is_closing: set once nothing more will come.
        thread: that does it.
    """

    def __init__(
        self, name: str, hand_on: Callable[[list[Item]], None], *, pause_s: float, max_waiting: int, max_at_once: int
    ) -> None:
        self.num_dropped = 0
        self.is_closing = threading.Event()
        self._hand_on = hand_on
        self._pause_s = pause_s
        self._max_at_once = max_at_once
        self._waiting: queue.Queue[Item] = queue.Queue(max_waiting)
        self._is_awake = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: Item, *, is_urgent: bool = False) -> None:
        """Never waits. What is urgent is handed on at once, with all that came before it."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.num_dropped += 1
        if is_urgent:
            self._is_awake.set()

    def close(self, patience_s: float | None = None) -> None:
        """Hands on what waits and ends the thread; one that takes longer than this is left to itself."""
        self.is_closing.set()
        self._is_awake.set()
        self.thread.join(patience_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._is_awake.wait(self._pause_s)
            self._is_awake.clear()
            is_last = self.is_closing.is_set()
            while batch := self._take():
                self._hand_on(batch)

    def _take(self) -> list[Item]:
        return [self._waiting.get_nowait() for _ in range(min(self._waiting.qsize(), self._max_at_once))]
