"""A growable array of page ids, of which a step takes views without copying.

    array   | 7 | 2 | 9 | 4 |   |   |   |   |        capacity is doubled when full
            |-- ids --------|                        handed out as a view, never changed

Elements behind the view may be written. To overwrite ids that were handed out, or to remove ids from the middle, the
list copies itself into a new array first. So the views of a step in flight stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PageIds = NDArray[np.int32]

_LEAST_ROOM = 16


class PageList:
    """The pages of one kind of layers, in the order of the session's positions.

    Attributes:
        ids: all page ids, int32 [pages], read-only; the array is never changed later.
    """

    def __init__(self) -> None:
        self._array: PageIds = np.empty(0, np.int32)
        # Elements before this index may have been handed out.
        self._num_written = 0
        self._show(0)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> int:
        return int(self.ids[at])

    def without(self, hidden: slice) -> PageIds:
        """The ids without the slice `hidden`."""
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
        """Removes and returns the pages behind the first `num_pages`."""
        removed: list[int] = self.ids[num_pages:].tolist()
        if removed:
            self._show(num_pages)
        return removed

    def remove(self, hidden: slice) -> list[int]:
        """Removes and returns the slice `hidden`."""
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
