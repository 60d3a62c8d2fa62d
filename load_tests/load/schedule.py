"""When turns are due: an open loop, whose arrivals do not wait for answers. Knows no server."""

from __future__ import annotations

from collections.abc import Iterator


def phase(index: int) -> float:
    """Where in a beat somebody's turns fall, in [0, 1): 0, 1/2, 1/4, 3/4, 1/8, …, so that any number is spread."""
    fraction, at = 0.5, 0.0
    while index:
        at += fraction * (index & 1)
        index >>= 1
        fraction /= 2
    return at


class Schedule:
    """Arrivals at equal distances, by a clock of one's own.

    Attributes:
        every_s: seconds between two of them.
        due_s: of the turn that is under way or comes next.

    Args:
        not_before_s: the first one is not due before this.
        every_s: see above.
        phase: where in the beat; beats are counted from the clock's zero, so that all who share it keep their phases.
    """

    def __init__(self, not_before_s: float, every_s: float, phase: float) -> None:
        self.every_s = every_s
        self._offset_s = phase * every_s
        self.due_s = self._next(not_before_s)

    def answered(self) -> None:
        """The turn is over; the one after it may be due already."""
        self.due_s += self.every_s

    def give_up(self, now_s: float) -> Iterator[float]:
        """Yields, for each turn that was due by now and is not answered, the seconds that it has waited; skips them."""
        while self.due_s <= now_s:
            yield now_s - self.due_s
            self.due_s += self.every_s

    def _next(self, time_s: float) -> float:
        beats = -(-(time_s - self._offset_s) // self.every_s)
        return beats * self.every_s + self._offset_s
