"""Time and chance of a run: one queue of events, in the order of a clock that only they move. Knows no servers.

Nothing here sleeps, and nothing asks the machine for the time or for chance: so a run is a pure function of its seed.
Each part draws from a source of its own, named after it; where a part is taken away, the others draw the same.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random

# So many of the last things that happened are told with a finding.
_TRACE_LEN = 60

# More events than this at one time are somebody who spins.
_MOST_AT_ONCE = 1000


class Broken(AssertionError):
    """An invariant does not hold.

    Attributes:
        invariant: its name: what makes two findings the same one.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


@dataclass(order=True)
class Event:
    """Something that happens once, unless it is called off."""

    time_s: float
    number: int
    action: Callable[[], None] | None = field(compare=False)

    def call_off(self) -> None:
        """It does not happen any more."""
        self.action = None


class World:
    """The clock, what is going to happen, and what happened last.

    Attributes:
        now_s: the time, monotonic.
        wall_offset_s: what the wall clock shows beyond it; clocks may jump.
        num_events: how many there were.
        trace: the last ones, in words.
        checks: are called after each event.

    Args:
        seed: of all chance.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 1000.0
        self.wall_offset_s = 1.7e9
        self.num_events = 0
        self.trace: deque[str] = deque(maxlen=_TRACE_LEN)
        self.checks: list[Callable[[], None]] = []
        self.is_told = False
        self._seed = seed
        self._events: list[Event] = []
        self._numbers = count()
        self._num_at_once = 0

    def random(self, *name: object) -> Random:
        """A source of chance of its own for a part of the run."""
        return Random("/".join(map(str, (self._seed, *name))))

    def wall_s(self) -> float:
        """Seconds since 1970, as the machines have it."""
        return self.now_s + self.wall_offset_s

    def after(self, delay_s: float, action: Callable[[], None]) -> Event:
        """Has something happen in so many seconds."""
        return self.at(self.now_s + delay_s, action)

    def at(self, time_s: float, action: Callable[[], None]) -> Event:
        """Has something happen at a time, or now if that has passed."""
        event = Event(max(time_s, self.now_s), next(self._numbers), action)
        heapq.heappush(self._events, event)
        return event

    def say(self, text: str) -> None:
        """Notes what happens, for who reads a finding."""
        line = f"{self.now_s - 1000.0:9.4f}  {text}"
        self.trace.append(line)
        if self.is_told:
            print(line, flush=True)

    def run_until(self, time_s: float) -> None:
        """Lets everything happen that is due by then."""
        while self._events and self._events[0].time_s <= time_s:
            event = heapq.heappop(self._events)
            self._num_at_once = 0 if event.time_s > self.now_s else self._num_at_once + 1
            if self._num_at_once > _MOST_AT_ONCE:
                raise Broken("time moves on", f"{_MOST_AT_ONCE} things happen at one time: somebody spins")
            self.now_s = max(self.now_s, event.time_s)
            if event.action is None:
                continue
            self.num_events += 1
            event.action()
            for check in self.checks:
                check()
        self.now_s = max(self.now_s, time_s)
