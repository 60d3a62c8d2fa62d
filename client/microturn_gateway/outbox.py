"""Events on their way to a client: a slow reader gets fewer and longer deltas, and is not read from meanwhile."""

from __future__ import annotations

import json
from collections import deque

from microturn_gateway.answer import Event

_FULL = 32
_DELTA = "response.output_text.delta"


class Outbox:
    """A queue of events. The caller bounds it: it reads nothing more from a client while the queue is full."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the client has to read before it is listened to again."""
        return len(self._events) >= _FULL

    def put(self, event: Event) -> None:
        """Adds an event; text of an answer whose text waits already is added to that."""
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == event["type"] == _DELTA and last["item_id"] == event["item_id"]:
            told = {**last["microturn"], "token_ids": last["microturn"]["token_ids"] + event["microturn"]["token_ids"]}
            self._events[-1] = {**last, "delta": last["delta"] + event["delta"], "microturn": told}
        else:
            self._events.append(event)

    def take(self) -> str | None:
        """The oldest event as JSON; None when there is none."""
        return json.dumps(self._events.popleft(), ensure_ascii=False) if self._events else None
