"""How fast each client is told of turns that cost nothing: keep-alives, refusals, answers from the record.

Triton keeps in memory what a client does not read, some 7 KB for each response, and never gives it back, not even when
the client has left. So what a client can have for nothing is paced: the first hundred answers at once, then ten a
second. What is too early waits for its time. Of those that wait only the last few are told; the others end in silence.

Knows keys and items, neither turns nor senders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")

RATE_PER_S = 10.0
BURST = 100
# As many as turns of a session may be outstanding by default, and then some.
MAX_HELD = 16
_PRUNE_ABOVE = 1024
_ROUNDING_S = 1e-6


class AnswerPace(Generic[Item]):
    """Items by key, each let through when its time has come.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # When a key's allowance will be whole again. A key that is not here has all of it.
        self._whole_at_s: dict[Hashable, float] = {}
        self._held: dict[Hashable, deque[Item]] = {}
        self._prune_above = _PRUNE_ABOVE

    def admits(self, key: Hashable) -> bool:
        """Takes one from a key's allowance, if nothing waits before it and something is left."""
        return key not in self._held and self._take(key)

    def hold(self, key: Hashable, item: Item) -> Item | None:
        """Has an item wait for its time; returns the one that gave way to it, if any."""
        held = self._held.setdefault(key, deque())
        held.append(item)
        return held.popleft() if len(held) > MAX_HELD else None

    def take_held(self, key: Hashable) -> list[Item]:
        """All that waits of a key, the oldest first: it must go now."""
        return list(self._held.pop(key, ()))

    def take_due(self) -> list[Item]:
        """What waited and whose time has come."""
        due: list[Item] = []
        for key, held in list(self._held.items()):
            while held and self._take(key):
                due.append(held.popleft())
            if not held:
                del self._held[key]
        return due

    def take_all(self) -> list[Item]:
        """All that waits."""
        held, self._held = self._held, {}
        return [item for items in held.values() for item in items]

    @property
    def is_waiting(self) -> bool:
        """Whether anything is held."""
        return bool(self._held)

    def _take(self, key: Hashable) -> bool:
        now_s = self._clock()
        whole_at_s = max(now_s, self._whole_at_s.get(key, now_s)) + 1 / RATE_PER_S
        if whole_at_s > now_s + BURST / RATE_PER_S + _ROUNDING_S:
            return False
        self._whole_at_s[key] = whole_at_s
        if len(self._whole_at_s) > self._prune_above:
            self._whole_at_s = {other: at_s for other, at_s in self._whole_at_s.items() if at_s > now_s}
            self._prune_above = max(_PRUNE_ABOVE, 2 * len(self._whole_at_s))
        return True
