"""Micro-turns out of an iterator: one thread pulls the source, turns begin on the beat."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from microturn_client._beat import MAX_WAITING, Beat, Coalescer
from microturn_client._events import Event
from microturn_client._inputs import TurnInput

# How soon the thread that pulls notices that nobody wants the source any more.
_NOTICE_S = 0.2


class _Source:
    """What a thread pulls from an iterator.

    Attributes:
        error: what the iterator raised; known once ``is_over``.
    """

    def __init__(self, source: Iterator[TurnInput]) -> None:
        self.error: BaseException | None = None
        self.arrived: queue.Queue[TurnInput] = queue.Queue(MAX_WAITING)
        self._over = threading.Event()
        self._is_left = False
        threading.Thread(target=self._pull, args=(source,), name="microturn-source", daemon=True).start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set() and self.arrived.empty()

    def leave(self) -> None:
        """Nobody wants any more."""
        self._is_left = True

    def _pull(self, source: Iterator[TurnInput]) -> None:
        try:
            for chunk in source:
                while not self._is_left:
                    try:
                        self.arrived.put(chunk, timeout=_NOTICE_S)
                    except queue.Full:
                        continue
                    break
                if self._is_left:
                    break
        except BaseException as error:
            self.error = error
        finally:
            self._over.set()


def turns_on_the_beat(
    begin: Callable[[TurnInput], Iterator[Event]], source: Iterator[TurnInput], every_s: float
) -> Iterator[Event | Beat]:
    """Takes a turn on each beat on which something has come, until the source ends.

    Args:
        begin: begins a turn.
        source: chunks of input; iterated by a thread of its own.
        every_s: seconds between two beats.

    Raises:
        MicroturnError: as turns do.
        Exception: what the source raises, once what came before it is done.
    """
    pulled = _Source(source)
    waiting = Coalescer()
    beat_at = time.monotonic()
    try:
        while len(waiting) or not pulled.is_over:
            if not len(waiting):
                try:
                    waiting.put(pulled.arrived.get(timeout=_NOTICE_S))
                except queue.Empty:
                    continue
            time.sleep(max(0.0, beat_at - time.monotonic()))
            is_held_up = pulled.arrived.full()
            while not pulled.arrived.empty() and len(waiting) < MAX_WAITING:
                waiting.put(pulled.arrived.get())
            given, num_chunks = waiting.take()
            late_s = max(0.0, time.monotonic() - beat_at)
            yield Beat(num_chunks, is_held_up, late_s * 1e3)
            yield from begin(given)
            beat_at = max(beat_at + every_s, time.monotonic())
        if pulled.error is not None:
            raise pulled.error
    finally:
        pulled.leave()
