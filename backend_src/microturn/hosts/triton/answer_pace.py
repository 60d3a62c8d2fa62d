"""Rate limit for answers that cost no computation: keep-alives, refusals, repeated answers.

Triton keeps responses that a client does not read in memory, about 7 KB each, and never frees them, not even after the
client has closed the connection. So such answers are paced: the first hundred are sent at once, then ten per second.
Later ones wait. Only the last few of the waiting answers are sent; the other requests end without a response.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")

RATE_PER_S = 10.0
BURST = 100
# More than the default limit of outstanding turns of a session.
MAX_HELD = 16
_PRUNE_ABOVE = 1024
_ROUNDING_S = 1e-6


class AnswerPace(Generic[Item]):
    """A token bucket per key, with a queue for items that come too early.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # When a key's allowance will be full again. A missing key has the full allowance.
        self._whole_at_s: dict[Hashable, float] = {}
        self._held: dict[Hashable, deque[Item]] = {}
        self._prune_above = _PRUNE_ABOVE

    def admits(self, key: Hashable) -> bool:
        """Takes one from a key's allowance; returns False if none is left or other items wait."""
        return key not in self._held and self._take(key)

    def hold(self, key: Hashable, item: Item) -> Item | None:
        """Queues an item; returns the item that it displaces, if any."""
        held = self._held.setdefault(key, deque())
        held.append(item)
        return held.popleft() if len(held) > MAX_HELD else None

    def take_held(self, key: Hashable) -> list[Item]:
        """Takes all waiting items of a key, oldest first, regardless of the allowance."""
        return list(self._held.pop(key, ()))

    def take_due(self) -> list[Item]:
        """Takes the waiting items that are due."""
        due: list[Item] = []
        for key, held in list(self._held.items()):
            while held and self._take(key):
                due.append(held.popleft())
            if not held:
                del self._held[key]
        return due

    def take_all(self) -> list[Item]:
        """Takes all waiting items."""
        held, self._held = self._held, {}
        return [item for items in held.values() for item in items]

    @property
    def is_waiting(self) -> bool:
        """Whether any item waits."""
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
