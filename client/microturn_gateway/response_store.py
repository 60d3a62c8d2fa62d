"""The stored responses: found by their ids by who asked for them, given up by age or when there are too many.

Callers share the room: who has most of it gives up its own, so that nobody takes what another has who has less.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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
    def output(self) -> Sequence[Mapping[str, Any]]:
        """Its own items, as clients see them."""
        output: Sequence[Mapping[str, Any]] = self.shown["output"]
        return output

    @property
    def is_stored(self) -> bool:
        """Whether its client wants it to be found by other requests."""
        stored: bool = self.shown["store"]
        return stored


class _Shelf(OrderedDict[str, StoredResponse]):
    """The responses of one caller, by their ids, the one unused for longest first.

    Attributes:
        num_chars: of all of them.
        of_items: the ids of their items, and of the response that each is of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_chars = 0
        self.of_items: dict[str, str] = {}

    def put(self, stored: StoredResponse) -> None:
        """Adds one, as the one used last."""
        self[stored.id] = stored
        self.num_chars += stored.num_chars
        self.of_items |= {item["id"]: stored.id for item in stored.output}

    def remove(self, response_id: str) -> None:
        """Removes one."""
        stored = self.pop(response_id)
        self.num_chars -= stored.num_chars
        for item in stored.output:
            del self.of_items[item["id"]]


class ResponseStore:
    """All of them.

    Args:
        max_sessions: how many sessions are kept at once.
        idle_timeout_s: how long an unused one is kept, seconds.
    """

    def __init__(self, max_sessions: int, idle_timeout_s: float) -> None:
        self._max_responses = max_sessions * _MAX_RESPONSES_OF_PLACE
        self._idle_timeout_s = idle_timeout_s
        self._shelves: dict[bytes, _Shelf] = {}

    def find(self, response_id: str, caller: bytes) -> StoredResponse | None:
        """A response that this caller asked for; None where there is none."""
        shelf = self._shelves.get(caller)
        if shelf is None or response_id not in shelf:
            return None
        shelf.move_to_end(response_id)
        stored = shelf[response_id]
        stored.used_at_s = _now_s()
        return stored

    def find_with(self, item_id: str, caller: bytes) -> StoredResponse | None:
        """The response to this caller that has an item; None where there is none."""
        shelf = self._shelves.get(caller)
        if shelf is None or item_id not in shelf.of_items:
            return None
        return self.find(shelf.of_items[item_id], caller)

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
        """Stores a response; where there is no room, those of who has most of it make way, first those long unused."""
        stored.used_at_s = _now_s()
        self._shelves.setdefault(stored.caller, _Shelf()).put(stored)
        for size, most in ((len, self._max_responses), (_num_chars, _MAX_CHARS)):
            while sum(map(size, self._shelves.values())) > most and sum(map(len, self._shelves.values())) > 1:
                caller, shelf = max(self._shelves.items(), key=lambda item: size(item[1]))
                self.forget(next(iter(shelf)), caller)

    def forget(self, response_id: str, caller: bytes) -> None:
        """Gives up a response of this caller."""
        shelf = self._shelves[caller]
        shelf.remove(response_id)
        if not shelf:
            del self._shelves[caller]

    async def reap(self) -> None:
        """Gives up unused ones, for as long as the gateway runs."""
        while True:
            await asyncio.sleep(min(_REAP_EVERY_S, self._idle_timeout_s))
            oldest_s = _now_s() - self._idle_timeout_s
            for stored in [stored for shelf in self._shelves.values() for stored in shelf.values()]:
                if stored.used_at_s < oldest_s:
                    self.forget(stored.id, stored.caller)


def _num_chars(shelf: _Shelf) -> int:
    return shelf.num_chars


def _now_s() -> float:
    return asyncio.get_running_loop().time()
