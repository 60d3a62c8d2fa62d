"""A thread that processes items in batches: `put` never blocks and seldom wakes it.

A thread that woke for each item would take the GIL from the engine thread as often.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class BatchThread(Generic[Item]):
    """Collects items for a moment, then hands them on in order.

    Args:
        name: of the thread.
        hand_on: takes a batch of at least one item; runs in the thread and must not raise.
        pause_s: how long it collects.
        max_waiting: capacity of the queue; items beyond it are dropped and counted.
        max_at_once: largest batch.

    Attributes:
        num_dropped: dropped items; `hand_on` may add its own.
        is_closing: set once no more items will come.
        thread: the thread.
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
        """Adds an item without blocking. An urgent item is handed on at once, with all items before it."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self.num_dropped += 1
        if is_urgent:
            self._is_awake.set()

    def close(self, patience_s: float) -> None:
        """Hands on the queued items and ends the thread; returns after `patience_s` even if it still runs."""
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
