"""Places of what runs at once, of which no caller can keep the others away.

A caller alone may have all of them. One that is refused while it has less than its share, an equal part of all, is
waited for: until it comes again nobody gets more than a share. So what ends makes room for it, and nothing is ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from microturn_gateway.failures import Refusal

_RETRY_AFTER_S = 1.0
# How long a place is kept for who was refused: one try may be late.
_WAITED_FOR_S = 3.0


class Places:
    """All of them.

    Args:
        num_places: how many may be taken at once.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._taken: Counter[bytes] = Counter()
        self._waited_for_until_s: dict[bytes, float] = {}

    @property
    def num_taken(self) -> int:
        """How many are taken now."""
        return self._taken.total()

    @contextmanager
    def take(self, caller: bytes) -> Iterator[None]:
        """Takes a place while the block runs.

        Args:
            caller: whose it is.

        Raises:
            Refusal: all are taken, or what is left is for others.
        """
        self._check(caller)
        self._waited_for_until_s.pop(caller, None)
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]

    def _check(self, caller: bytes) -> None:
        now_s = time.monotonic()
        waited_for = {each: until_s for each, until_s in self._waited_for_until_s.items() if until_s > now_s}
        self._waited_for_until_s = waited_for
        share = max(1, self._num_places // len({caller, *self._taken, *waited_for}))
        has_share = self._taken[caller] >= share
        are_others_waited_for = bool(waited_for.keys() - {caller})
        if self.num_taken < self._num_places and not (has_share and are_others_waited_for):
            return
        if not has_share:
            waited_for[caller] = now_s + _WAITED_FOR_S
        raise no_place()


def no_place() -> Refusal:
    """There is none, and when to ask again."""
    message = "all places are taken: try again later"
    return Refusal("too_many_sessions", message, http_status=429, retry_after_s=_RETRY_AFTER_S)
