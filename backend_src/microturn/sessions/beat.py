"""When a session's next turn is due, if its turns come regularly."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

# So many turns in a row must have come regularly before the next one is expected.
_NUM_ARRIVALS = 4

# Regular is: no interval is longer than the shortest by more than this share of it.
_TOLERANCE = 0.25

# Enough to get a session ready, however slow its beat.
_ENOUGH_S = 1.0


class Beat:
    """The last arrivals of a session's turns."""

    def __init__(self) -> None:
        self._arrivals_s: deque[float] = deque(maxlen=_NUM_ARRIVALS)

    def note(self, arrived_s: float) -> None:
        """A turn has come."""
        self._arrivals_s.append(arrived_s)

    @property
    def wanted_s(self) -> float | None:
        """From when on the session should be ready for its next turn; None when they are not regular.

        A quarter of the shortest interval is left for getting ready, but of a slow beat no more than is enough: of
        many such sessions, those that came back long before their turns would push each other out.
        """
        if len(self._arrivals_s) < _NUM_ARRIVALS:
            return None
        intervals = [later - earlier for earlier, later in pairwise(self._arrivals_s)]
        shortest_s, longest_s = min(intervals), max(intervals)
        if shortest_s <= 0 or longest_s > shortest_s * (1 + _TOLERANCE):
            return None
        lead_s = min(shortest_s / 4, longest_s - shortest_s + _ENOUGH_S)
        return self._arrivals_s[-1] + shortest_s - lead_s
