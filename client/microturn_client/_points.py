"""At which points of a transcript the server's session has stood, by the number of its next turn.

A server that was killed restores a session as it was saved, some turns ago. The number of its next turn says where in
the transcript that was. Each turn with a number adds a point, also one that adds no entry:

    turn          0 appends   1 appends   2 counts   3 cuts 1 away   4 appends
    next number   1           ─           ─          4               5
    entries       1           2           2          1               2

A point behind which the transcript was cut stays; one that the cut took away is forgotten.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

_BYTES_PER_POINT = 8


class Points:
    """The points of one transcript. Later ones have higher numbers, and as many entries or more."""

    def __init__(self) -> None:
        self._next_numbers = array("i")
        self._nums_entries = array("i")

    @property
    def num_bytes(self) -> int:
        """About how much memory they take."""
        return _BYTES_PER_POINT * len(self._next_numbers)

    def add(self, next_number: int, num_entries: int) -> None:
        """Adds a point behind the others; it takes the place of one with the same number."""
        self.keep_up_to(next_number - 1)
        self._next_numbers.append(next_number)
        self._nums_entries.append(num_entries)

    def find(self, next_number: int) -> int | None:
        """How many entries there were; None where there is no such point."""
        index = bisect_left(self._next_numbers, next_number)
        is_there = index < len(self._next_numbers) and self._next_numbers[index] == next_number
        return self._nums_entries[index] if is_there else None

    def cut(self, num_entries: int) -> None:
        """Forgets those with more entries."""
        self._keep(bisect_right(self._nums_entries, num_entries))

    def keep_up_to(self, next_number: int) -> None:
        """Forgets those with a higher number."""
        self._keep(bisect_right(self._next_numbers, next_number))

    def _keep(self, num_points: int) -> None:
        del self._next_numbers[num_points:], self._nums_entries[num_points:]
