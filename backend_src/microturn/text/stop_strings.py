"""Stop strings in text that arrives in pieces.

The stop string that is complete first counts, so that the result does not depend on the pieces.
"""

from __future__ import annotations

from functools import lru_cache

from microturn.errors import InvalidArgument
from microturn.text.codec import Piece


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

    def scan(self, text: str) -> tuple[Piece, str]:
        """Scans the withheld text followed by new text.

        Returns:
            Text that cannot belong to a stop string, with the stop string behind it (text behind that is dropped); and
            the text to withhold, which may be the beginning of one.
        """
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)  # of those with the same end the longest: it starts first
            return Piece(text[:start], stop), ""
        longest = min(len(text), self._longest - 1)
        lengths = range(longest, 0, -1)
        num_withheld = next((length for length in lengths if text[-length:] in self._beginnings), 0)
        kept = len(text) - num_withheld
        return Piece(text[:kept]), text[kept:]


@lru_cache(maxsize=256)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Returns a cached finder: sessions tend to use few different stop strings."""
    return StopStrings(stops)
