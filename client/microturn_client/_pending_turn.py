"""One turn: what was asked, what has come for it, and what of that was handed out. Knows no session and no stream.

A turn may be sent more than once: on another stream, to another server. What comes again is recognised by how much has
come before, so its reader gets each token and each character once. Three things may happen to it besides:

- it is *left*: nobody reads any more, and what was handed out is all that is wanted of it;
- it is *limited*: an interrupt said how much of it was heard, and the rest does not count;
- it is *held*: an interrupt on its way may undo it; what comes is kept back until that is decided.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from microturn_client._errors import MicroturnError
from microturn_client._events import REBUILT, Event, Resumed, Status, Tokens, TurnEnd
from microturn_client._inputs import InputTensor, encode_input
from microturn_client._wire import Response


class PendingTurn:
    """Collects the events of one turn.

    Attributes:
        tensor: its input.
        options: what its user said, ``max_tokens`` included.
        sent_options: what was said on the wire, the same as long as its number is the same.
        deadline: the clock's time after which its user waits no longer.
        number: under which it was sent; None when it was not, or its number is void.
        is_end: it closes the session.
        is_cut: it interrupts and cuts, and does nothing else.
        is_passing: the session's own, a keep-alive or a part of a replay: it has no number and is never repeated.
        is_patient: it was taken once before, so it is not refused for want of room: few of them are sent at a time.
        is_left: see above.
        is_held: see above.
        is_settled: it was left, and what nobody wants of it is being cut.
        is_silent: an interrupt came before its answer: its input is appended, and it is not answered.
        shows_ids: its user asked what its input became.
        limit: tokens that count; None is all.
        start: absolute position of its first token; None before that has come.
        ids: all tokens that have come.
        num_handed: tokens that were handed out.
        result: its status once it has ended well on the server.
        num_faults: how often the server has failed at it.
    """

    def __init__(self, tensor: InputTensor, options: Mapping[str, object], deadline: float) -> None:
        self.tensor = tensor
        self.options = dict(options)
        self.sent_options: Mapping[str, object] = self.options
        self.deadline = deadline
        self.number: int | None = None
        self.is_end = self.is_cut = self.is_passing = self.is_patient = False
        self.is_left = self.is_held = self.is_settled = self.is_silent = False
        self.shows_ids = False
        self.limit: int | None = None
        self.start: int | None = None
        self.ids: list[int] = []
        self.num_handed = 0
        self.result: Status | None = None
        self.num_faults = 0
        self._num_chars = 0
        self._num_ids_again = self._num_chars_again = 0
        self._is_diverged = False
        self._events: deque[Event] = deque()
        self._handed: list[Tokens] = []
        self._error: MicroturnError | None = None
        self._is_over = False

    @classmethod
    def keepalive(cls) -> Self:
        """An empty turn that nobody reads."""
        turn = cls(encode_input(None), {"max_tokens": 0}, math.inf)
        turn.is_passing = True
        return turn

    # ---- what arrives --------------------------------------------------------------------------------------------

    def take_in(self, response: Response, context_len: int) -> None:
        """Adds what a response brought; ``context_len`` is where text stands that comes before any token."""
        if response.error is not None:
            self.fail(response.error)
            return
        ids, text = self._new_ids(response), self._new_text(response)
        if ids or text:
            position = context_len if self.start is None else self.start + len(self.ids)
            if ids and self.start is None:
                assert response.position is not None
                self.start = position = response.position
            self.ids += ids
            logprobs = None if response.logprobs is None else response.logprobs[len(response.ids) - len(ids) :]
            self._add(Tokens(text, ids, position, logprobs))
        if response.status is not None:
            if response.status.rebuilt:
                self._add(REBUILT)
            self.result = response.status
            del self.ids[self._num_ids_again :]  # sent again, it may have been asked for less
            self._end_with(response.status)

    def _new_ids(self, response: Response) -> tuple[int, ...]:
        before = self._num_ids_again
        self._num_ids_again += len(response.ids)
        num_known = max(0, min(len(response.ids), len(self.ids) - before))
        known, again = self.ids[before : before + num_known], list(response.ids[:num_known])
        self.ids[before : before + num_known] = again
        if again != known and not self._is_diverged:
            self._is_diverged = True
            self._add(Resumed(exact=False, reason="what the server says now differs from what it had said"))
        return response.ids[num_known:]

    def _new_text(self, response: Response) -> str:
        before = self._num_chars_again
        self._num_chars_again += len(response.text)
        text = response.text[max(0, self._num_chars - before) :]
        self._num_chars += len(text)
        return text

    def _add(self, event: Event) -> None:
        if self._is_over or self.is_left:
            return
        if isinstance(event, Tokens) and self.limit is not None and self.start is not None:
            room = self.limit - (event.position - self.start)
            if room <= 0:
                return
            event = replace(event, ids=event.ids[:room], logprobs=event.logprobs and event.logprobs[:room])
        self._events.append(event)

    def _end_with(self, status: Status) -> None:
        if self.is_silent and self.generates:
            status = replace(status, finish_reason="interrupted")
        if not self.shows_ids:
            status = replace(status, appended_ids=None)
        self._add(TurnEnd(status))
        self._is_over = True

    def fail(self, error: MicroturnError) -> None:
        """Ends the turn with an error of its own, unless it has ended: the first end stands."""
        if not self._is_over:
            self._error = None if self.is_left else copy.copy(error)
            self._is_over = True

    # ---- what is handed out --------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be handed out than what is there."""
        return self.is_left or self._error is not None or (self._is_over and not self.is_held)

    @property
    def has_failed(self) -> bool:
        """Whether its user was told an error."""
        return self._error is not None

    @property
    def has_reader(self) -> bool:
        """Whether somebody waits for what comes."""
        return not self.is_left and not self._is_over

    @property
    def generates(self) -> bool:
        """Whether it asks for tokens."""
        return self.options.get("max_tokens") != 0

    @property
    def is_behind(self) -> bool:
        """Whether it was sent again and its answer has not yet come as far as before."""
        return self._num_ids_again < len(self.ids)

    @property
    def end(self) -> int:
        """The position behind what was handed out; of a turn with a start."""
        assert self.start is not None
        return self.start + self.num_handed

    def leave(self) -> None:
        """Its user left: drops what is there and hands nothing more out. Safe from any thread, also without a lock."""
        self.is_left = True

    def announce(self, event: Resumed) -> None:
        """Adds an event about the session."""
        self._add(event)

    def next_event(self) -> Event | None:
        """The oldest event not handed out yet; None when there is none now, or, once ``is_over``, none any more.

        Raises:
            MicroturnError: when the turn failed, after the events that came before.
        """
        if self.is_left:
            self._events.clear()
            if self._error is not None:
                raise self._error
            return None
        if self._events and not self.is_held:
            event = self._events.popleft()
            if isinstance(event, Tokens):
                self.num_handed += len(event.ids)
                self._handed.append(event)
            return event
        if self._error is not None:
            raise self._error
        return None

    def position_after(self, *, num_chars: int | None = None, text: str | None = None) -> int:
        """The position behind so much of the text that was handed out: the token is kept in which it ends.

        Raises:
            ValueError: ``text`` is not how the answer begins.
        """
        assert self.start is not None
        if text is not None:
            said = "".join(event.text for event in self._handed)
            num_spaces = len(said) - len(said.lstrip())
            if not said.lstrip().startswith(text.lstrip()):
                raise ValueError("heard_text is not how the answer begins")
            num_chars = len(text.lstrip()) + num_spaces if text.lstrip() else 0
        assert num_chars is not None
        position = self.start
        for event in self._handed:
            if num_chars <= 0:
                break
            position = event.position + len(event.ids)
            num_chars -= len(event.text)
        return position

    # ---- what is done with it ------------------------------------------------------------------------------------

    def send_again(self) -> None:
        """It will be sent once more as it was, or where the session was opened anew; its answer begins anew."""
        self._num_ids_again = self._num_chars_again = 0

    def redo(self) -> None:
        """It was undone by an interrupt of a turn before it, and begins from nothing."""
        self.number, self.start, self.result = None, None, None
        self.ids, self._num_chars = [], 0
        self.num_handed = 0
        self._handed.clear()
        self.is_held = self.is_settled = False
        self.is_patient = True
        self.limit = None
        if self._error is None:
            self._is_over = False
            self._events.clear()
        self.send_again()

    def has_input_there(self) -> None:
        """Its input is in the context already; to be done again, it only goes on."""
        self.tensor = encode_input(None)

    def limit_to(self, num_tokens: int) -> None:
        """Only its first tokens count."""
        self.limit = num_tokens if self.limit is None else min(self.limit, num_tokens)
        events, self._events = self._events, deque()
        is_over, self._is_over = self._is_over, False
        for event in events:
            self._add(event)
        self._is_over = is_over

    def fix_options(self) -> None:
        """It is sent under a new number: no more is asked for than is still wanted of it."""
        caps = [0] if self.is_silent else [] if self.limit is None else [self.limit]
        caps += [self.num_handed] if self.is_left else []
        asked = self.options.get("max_tokens")
        if caps and isinstance(asked, int):
            self.sent_options = {**self.options, "max_tokens": min(asked, *caps)}
        else:
            self.sent_options = dict(self.options)
