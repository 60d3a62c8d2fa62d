"""What befell one session, and who has yet to be told: each loss reaches a status, an iterator and the callback."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from microturn_client._events import Resumed
from microturn_client._pending_turn import PendingTurn

_NUM_KEPT = 100


class News:
    """The news of one session.

    Attributes:
        past: the last of them, the oldest first.
        unread: those that only a call which returns a status was told; the next turn that is iterated over tells them.
    """

    def __init__(self) -> None:
        self.past: deque[Resumed] = deque(maxlen=_NUM_KEPT)
        self.unread: deque[Resumed] = deque(maxlen=_NUM_KEPT)
        self._untold: list[Resumed] = []
        self._uncalled: list[Resumed] = []

    def happened(self, event: Resumed, turns: Iterable[PendingTurn]) -> None:
        """Something befell the session: the first of these turns that has a reader is told, or the next one."""
        reader = next((turn for turn in turns if turn.has_reader and not turn.is_passing), None)
        if reader is not None:
            reader.tell(event)
        self.note(event, is_told=reader is not None)

    def note(self, event: Resumed, *, is_told: bool) -> None:
        """Something befell the session, and perhaps a turn with a reader was told."""
        self.past.append(event)
        self._uncalled.append(event)
        if not is_told:
            self._untold.append(event)

    def tell(self, turn: PendingTurn) -> None:
        """Tells a turn that is begun what no turn could be told when it happened."""
        for event in self._untold:
            turn.tell(event)
        self._untold.clear()

    def take_unread(self) -> deque[Resumed]:
        """What no iterator has told, once."""
        events, self.unread = self.unread, deque(maxlen=_NUM_KEPT)
        return events

    def take_uncalled(self) -> list[Resumed]:
        """What the callback has not been called with, once."""
        events, self._uncalled = self._uncalled, []
        return events
