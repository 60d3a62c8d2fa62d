"""Stop strings in text that arrives in pieces.

The stop string that is complete first counts, so that the result does not depend on the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from microturn.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Scanned:
    """The result of scanning a piece of text.

    Attributes:
        text: text that cannot belong to a stop string.
        withheld: text that may be the beginning of one.
        stop: the stop string behind `text`, or None. Text behind it is dropped.
    """

    text: str
    withheld: str
    stop: str | None


class StopStrings:
    """Finds stop strings.

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
        """Scans the withheld text followed by new text."""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)  # of those with the same end the longest: it starts first
            return Scanned(text[:start], "", stop)
        longest = min(len(text), self._longest - 1)
        lengths = range(longest, 0, -1)
        num_withheld = next((length for length in lengths if text[-length:] in self._beginnings), 0)
        kept = len(text) - num_withheld
        return Scanned(text[:kept], text[kept:], None)


@lru_cache(maxsize=256)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Returns a cached finder: sessions tend to use few different stop strings."""
    return StopStrings(stops)
