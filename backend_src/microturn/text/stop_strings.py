"""Stop strings in text that arrives in pieces.

The string that is complete first stops, so the result doesn't depend on how the text was cut into pieces. Knows no
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from microturn.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Scanned:
    """What is known about text after a piece of it was scanned.

    Attributes:
        text: cannot belong to a stop string.
        withheld: may be the beginning of one.
        stop: the stop string that comes after `text`, or None. What follows it is gone.
    """

    text: str
    withheld: str
    stop: str | None


class StopStrings:
    """Finds any of some strings.

    Errors:
        InvalidArgument: one of them is empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if "" in stops:
            raise InvalidArgument("a stop string is empty: leave it out")
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._beginnings = frozenset(stop[:end] for stop in stops for end in range(1, len(stop)))

    def scan(self, text: str) -> Scanned:
        """Scans what was withheld so far with new text behind it."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)  # of those that end together the longest: it starts first
            return Scanned(text[:start], "", stop)
        longest = min(len(text), self._longest - 1)
        lengths = range(longest, 0, -1)
        num_withheld = next((length for length in lengths if text[-length:] in self._beginnings), 0)
        kept = len(text) - num_withheld
        return Scanned(text[:kept], text[kept:], None)


@lru_cache(maxsize=256)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The same finder for the same strings: sessions tend to use few."""
    return StopStrings(stops)
