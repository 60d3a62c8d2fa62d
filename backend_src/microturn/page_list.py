"""Page ids in an array that stays as long as its session does: a step reads a part of it, and walks no ids.

    array   | 7 | 2 | 9 | 4 |   |   |   |   |        room is doubled when it is full
            |-- ids --------|                        handed out, and never changed

What is behind the pages may be written, since nobody has seen it. Where ids have been taken away, others come in their
place; then, and where some go from the middle, the rest is copied into another array first. So a step that is under way
keeps what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]

_LEAST_ROOM = 16


class PageList:
    """The pages of one kind of layers, in the order of a session's positions.

    Attributes:
        ids: all of them, int32 [pages], read only: these stay as they are whatever becomes of the list.
    """

    def __init__(self) -> None:
        self._array: PageIds = np.empty(0, np.int32)
        # What stands before that in the array may have been handed out.
        self._num_written = 0
        self._show(0)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> int:
        return int(self.ids[at])

    def without(self, hidden: slice) -> PageIds:
        """The ids but for some in a row."""
        return np.concatenate((self.ids[: hidden.start], self.ids[hidden.stop :]))

    def extend(self, pages: Sequence[int]) -> None:
        """Appends pages."""
        if not pages:
            return
        first, end = len(self), len(self) + len(pages)
        if end > len(self._array) or self._num_written > first:
            self._move(self.ids, room=max(_LEAST_ROOM, 2 * end) if end > len(self._array) else len(self._array))
        self._array[first:end] = pages
        self._num_written = end
        self._show(end)

    def truncate(self, num_pages: int) -> list[int]:
        """Takes away what is behind so many pages, and returns it."""
        removed: list[int] = self.ids[num_pages:].tolist()
        if removed:
            self._show(num_pages)
        return removed

    def remove(self, hidden: slice) -> list[int]:
        """Takes away some in a row, and returns them; those behind close up."""
        removed: list[int] = self.ids[hidden].tolist()
        self._move(self.without(hidden), room=len(self._array))
        return removed

    def _move(self, ids: PageIds, room: int) -> None:
        self._array = np.empty(room, np.int32)
        self._array[: len(ids)] = ids
        self._num_written = len(ids)
        self._show(len(ids))

    def _show(self, num_pages: int) -> None:
        self.ids = self._array[:num_pages]
        self.ids.flags.writeable = False
