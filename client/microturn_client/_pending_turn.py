"""One turn between its request and its end: what has come for it and was not handed out yet. Knows no session."""

from __future__ import annotations

import copy
from collections import deque

from microturn_client._errors import MicroturnError
from microturn_client._events import Event, Tokens, TurnEnd
from microturn_client._wire import ModelInferRequest, Response


class PendingTurn:
    """Collects the events of one turn.

    Attributes:
        request: what was or will be sent; its id matches responses to this turn.
        deadline: the clock's time after which its user waits no longer.
        is_over: nothing more is taken in.
    """

    def __init__(self, request: ModelInferRequest, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.is_over = False
        self._events: deque[Event] = deque()
        self._error: MicroturnError | None = None
        self._next_position: int | None = None

    def take_in(self, response: Response, context_len: int) -> None:
        """Adds what a response brought; ``context_len`` is where text stands that comes before any token."""
        if self.is_over:
            return
        if response.error is not None:
            self.fail(response.error)
            return
        position = response.position if response.position is not None else self._next_position
        if response.text or response.ids:
            position = context_len if position is None else position
            self._events.append(Tokens(response.text, response.ids, position, response.logprobs))
            self._next_position = position + len(response.ids)
        if response.status is not None:
            self._events.append(TurnEnd(response.status))
            self.is_over = True

    def fail(self, error: MicroturnError) -> None:
        """Ends the turn with an error of its own, unless it has ended: the first end stands."""
        if not self.is_over:
            self._error = copy.copy(error)
            self.is_over = True

    def abandon(self) -> None:
        """Its user left: drops what is there and takes nothing more in. Safe from any thread, also without the lock."""
        self.is_over = True
        self._error = None
        self._events.clear()

    def next_event(self) -> Event | None:
        """The oldest event not handed out yet; None when there is none now, or, once ``is_over``, none any more.

        Raises:
            MicroturnError: when the turn failed, after the events that came before.
        """
        if self._events:
            return self._events.popleft()
        if self._error is not None:
            raise self._error
        return None
