"""The stored responses: found by their ids by who asked for them, given up by age or when there are too many."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from microturn_gateway.failures import Refusal
from microturn_gateway.response_items import ConversationItem, num_chars_of

_REAP_EVERY_S = 5.0
# A conversation of a hundred turns leaves a hundred responses, of which any may be gone on from.
_MAX_RESPONSES_OF_PLACE = 16
_MAX_CHARS = 2**26


@dataclass
class StoredResponse:
    """One response.

    Attributes:
        caller: who asked for it.
        shown: as clients see it.
        items: the whole conversation up to its end, without instructions.
        num_chars: how much it takes; what responses of one conversation share counts for each.
        used_at_s: when it was asked for last.
    """

    caller: bytes
    shown: Mapping[str, Any]
    items: tuple[ConversationItem, ...]
    num_chars: int = field(init=False)
    used_at_s: float = 0.0

    def __post_init__(self) -> None:
        self.num_chars = num_chars_of(self.items) + len(json.dumps(self.shown))

    @property
    def id(self) -> str:
        """Of the response."""
        response_id: str = self.shown["id"]
        return response_id

    @property
    def is_stored(self) -> bool:
        """Whether its client wants it to be found by other requests."""
        stored: bool = self.shown["store"]
        return stored


class ResponseStore:
    """All of them.

    Args:
        max_sessions: how many sessions are kept at once.
        idle_timeout_s: how long an unused one is kept, seconds.
    """

    def __init__(self, max_sessions: int, idle_timeout_s: float) -> None:
        self._max_responses = max_sessions * _MAX_RESPONSES_OF_PLACE
        self._idle_timeout_s = idle_timeout_s
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # the one unused for longest first
        self._num_chars = 0

    def find(self, response_id: str, caller: bytes) -> StoredResponse | None:
        """A response that this caller asked for; None where there is none."""
        stored = self._kept.get(response_id)
        if stored is None or stored.caller != caller:
            return None
        stored.used_at_s = _now_s()
        self._kept.move_to_end(response_id)
        return stored

    def get(self, response_id: str, caller: bytes) -> StoredResponse:
        """A response that this caller asked for.

        Raises:
            Refusal: there is none.
        """
        stored = self.find(response_id, caller)
        if stored is None:
            raise Refusal("response_not_found", f"there is no response '{response_id}' here", http_status=404)
        return stored

    def keep(self, stored: StoredResponse) -> None:
        """Stores a response; those unused for longest make way."""
        stored.used_at_s = _now_s()
        self._kept[stored.id] = stored
        self._num_chars += stored.num_chars
        while len(self._kept) > 1 and (len(self._kept) > self._max_responses or self._num_chars > _MAX_CHARS):
            self.forget(next(iter(self._kept)))

    def forget(self, response_id: str) -> None:
        """Gives up a response."""
        self._num_chars -= self._kept.pop(response_id).num_chars

    async def reap(self) -> None:
        """Gives up unused ones, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(min(_REAP_EVERY_S, self._idle_timeout_s))
            oldest_s = _now_s() - self._idle_timeout_s
            for stored in list(self._kept.values()):
                if stored.used_at_s < oldest_s:
                    self.forget(stored.id)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
