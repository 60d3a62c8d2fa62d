"""Until when turns must be done, the earliest first, and what one ends with whose time passes before it runs."""

from __future__ import annotations

import heapq
from itertools import count
from weakref import ReferenceType, ref

from microturn.errors import DeadlineExceeded
from microturn.sessions.turn import Turn

_FEW = 64


class Deadlines:
    """Turns with a deadline. Those that were answered are forgotten little by little."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, ReferenceType[Turn]]] = []
        self._numbers = count()
        self._most_entries = _FEW

    def __len__(self) -> int:
        return len(self._entries)

    def watch(self, turn: Turn) -> None:
        """Minds the deadline of an open turn, if it has one."""
        if turn.deadline_s is None:
            return
        heapq.heappush(self._entries, (turn.deadline_s, next(self._numbers), ref(turn)))
        if len(self._entries) > self._most_entries:
            self._entries = [entry for entry in self._entries if self._open_turn(entry) is not None]
            heapq.heapify(self._entries)
            self._most_entries = 2 * len(self._entries) + _FEW

    def next_s(self) -> float | None:
        """The earliest deadline of a turn that is open."""
        while self._entries and self._open_turn(self._entries[0]) is None:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def pop_late(self, now_s: float) -> Turn | None:
        """An open turn whose deadline has passed, the one of the earliest first; each is named once."""
        next_s = self.next_s()
        return None if next_s is None or next_s > now_s else self._open_turn(heapq.heappop(self._entries))

    def _open_turn(self, entry: tuple[float, int, ReferenceType[Turn]]) -> Turn | None:
        turn = entry[2]()
        return None if turn is None or turn.is_answered else turn


def check_time(turn: Turn, now_s: float) -> None:
    """Raises DeadlineExceeded where a turn's time has passed."""
    if turn.is_late(now_s):
        raise too_late()


def too_late() -> DeadlineExceeded:
    """What a turn ends with whose deadline passes before it runs."""
    return DeadlineExceeded("the turn's time passed while it waited: nothing was appended")
