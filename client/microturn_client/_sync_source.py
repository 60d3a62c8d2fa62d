"""What a program says to a session on the beat, as a thread pulls it; ``_aio_source`` has the same for asyncio."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

from microturn_client._beat import MAX_WAITING, Coalescer
from microturn_client._inputs import TurnInput

# How soon the thread that pulls a source notices that it is not wanted any more.
_NOTICE_S = 0.2


class Source:
    """Chunks of input that a thread pulls from an iterator; it waits while ``MAX_WAITING`` of them do."""

    def __init__(self, source: Iterator[TurnInput]) -> None:
        self._arrived: queue.Queue[TurnInput] = queue.Queue(MAX_WAITING)
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._is_left = False
        threading.Thread(target=self._pull, args=(source,), name="microturn-source", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether the source has ended, and none of its chunks is left here."""
        return self._end.is_set() and self._arrived.empty()

    def wait(self, waiting: Coalescer) -> bool:
        """Waits for the next chunk, which may be put there; False when the source has ended and none is left."""
        while not (self._end.is_set() and self._arrived.empty()):
            try:
                waiting.put(self._arrived.get(timeout=_NOTICE_S))
            except queue.Empty:
                continue
            return True
        return False

    def drain(self, waiting: Coalescer) -> bool:
        """Puts there what has come, as far as it may wait; says whether the source was held up."""
        is_held_up = self._arrived.full()
        while not self._arrived.empty() and len(waiting) < MAX_WAITING:
            waiting.put(self._arrived.get())
        return is_held_up

    def check(self) -> None:
        """Raises what the source raised; call it when the source has ended."""
        if self._error is not None:
            raise self._error

    def leave(self) -> None:
        """Pulls no more."""
        self._is_left = True

    def _pull(self, source: Iterator[TurnInput]) -> None:
        try:
            for chunk in source:
                while not self._is_left:
                    try:
                        self._arrived.put(chunk, timeout=_NOTICE_S)
                    except queue.Full:
                        continue
                    break
                if self._is_left:
                    break
        except BaseException as error:
            self._error = error
        finally:
            self._end.set()
