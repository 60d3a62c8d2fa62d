"""One turn: what was asked, what has come for it, and what of that was handed out. Knows no session and no stream."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Self

from microturn_client._errors import MicroturnError
from microturn_client._events import REBUILT, Event, Resumed, Status, Tokens, TurnEnd
from microturn_client._inputs import InputTensor, encode_input
from microturn_client._phase import ENDED, HELD, RELEASED, Phase, Role
from microturn_client._received_answer import ReceivedAnswer
from microturn_client._tool_events import ToolEvent
from microturn_client._wire import Response


class PendingTurn:
    """Collects the events of one turn.

    Attributes:
        tensor: its input.
        options: what its user said, ``max_tokens`` included.
        sent_options: what was said on the wire, the same as long as its number is the same.
        deadline: the clock's time after which its user waits no longer.
        begun_at: the clock's time when its user began it.
        patience_s: how long its user waits while nothing comes for the session, in seconds.
        follows: the turn without which it makes no sense: it fails where that one does.
        refusal: why the server had no room for it when it was sent last; None when it was not refused.
        number: under which it was sent; None when it was not, or its number is void.
        role: what it is for.
        phase: see ``_phase``.
        is_left: likewise.
        is_settled: likewise.
        num_undone: how often a cut has undone it. The server took it once, so it must not be refused for want of room:
            few turns that were undone are sent at a time.
        limit: tokens that count; None is all.
        num_handed: tokens that were handed out.
        result: its status once it has ended well on the server.
        num_faults: how often the server has failed at it.
        resumed: what befell its session, as it was told.
        handed: the tokens that were handed out.
        error: what its user was told instead of an answer.

    Args:
        shows_ids: its status says what its input became; the others see above.
        tool_names: of the tools that its answer may call.
    """

    def __init__(
        self,
        tensor: InputTensor,
        options: Mapping[str, object],
        deadline: float = math.inf,
        *,
        role: Role = Role.TURN,
        shows_ids: bool = False,
        tool_names: Collection[str] = (),
    ) -> None:
        self.tensor = tensor
        self.options = dict(options)
        self.sent_options: Mapping[str, object] = self.options
        self.deadline = deadline
        self.begun_at, self.patience_s = -math.inf, math.inf
        self.follows: PendingTurn | None = None
        self.refusal: MicroturnError | None = None
        self.number: int | None = None
        self.role = role
        self.phase = Phase.OPEN
        self.is_left = self.is_settled = False
        self.num_undone = 0
        self.limit: int | None = None
        self.num_handed = 0
        self.result: Status | None = None
        self.num_faults = 0
        self.resumed: list[Resumed] = []
        self._shows_ids = shows_ids
        self._events: deque[Event] = deque()
        self.handed: list[Tokens] = []
        self.error: MicroturnError | None = None
        self._tool_names = tool_names
        self._received = ReceivedAnswer(tool_names)

    @classmethod
    def keepalive(cls) -> Self:
        """An empty turn that nobody reads."""
        return cls(encode_input(None), {"max_tokens": 0, "deadline_ms": 0}, role=Role.PASSING)

    # ---- what arrives --------------------------------------------------------------------------------------------

    def take_in(self, response: Response, context_len: int) -> None:
        """Adds what a response brought; ``context_len`` is where text stands that comes before any token."""
        had_diverged = self._received.has_diverged
        events = self._received.take_in(response, context_len)
        if self._received.has_diverged and not had_diverged:
            differs = "what the server says now differs from what it had said"
            self.tell(Resumed(same_tokens=False, same_numerics=False, reason=differs))
        for event in events:
            self.add(event)
        if response.status is not None:
            for event in self._received.end(context_len):
                self.add(event)
            if response.status.rebuilt:
                self.tell(REBUILT)
            self.result = response.status
            self._end_with(response.status)

    def tell(self, event: Resumed) -> None:
        """Something befell its session: its status says so too."""
        self.resumed.append(event)
        self.add(event)

    def add(self, event: Event) -> None:
        """Adds an event for its reader, as far as it counts."""
        if self.has_reader:
            self._events += self._limited(event)

    def _limited(self, event: Event) -> tuple[Event, ...]:
        """What counts of an event."""
        if isinstance(event, ToolEvent) and self.limit is not None:
            return ()  # nobody acts upon an answer that was interrupted
        if not isinstance(event, Tokens) or self.limit is None or self.start is None:
            return (event,)
        room = self.limit - (event.position - self.start)
        if room <= 0:
            return ()
        logprobs = event.logprobs and event.logprobs[:room]
        top_logprobs = event.top_logprobs and event.top_logprobs[:room]
        return (replace(event, ids=event.ids[:room], logprobs=logprobs, top_logprobs=top_logprobs),)

    def _end_with(self, status: Status) -> None:
        if self.role is Role.SILENT and self.generates:
            status = replace(status, finish_reason="interrupted")
        if not self._shows_ids:
            status = replace(status, appended_ids=None)
        if self.resumed:
            status = replace(status, resumed=tuple(self.resumed))
        self.add(TurnEnd(status))
        self.phase = ENDED.get(self.phase, self.phase)

    def fail(self, error: MicroturnError) -> None:
        """Ends the turn with an error of its own, unless it has ended: the first end stands."""
        if self.phase in ENDED:
            self.error = None if self.is_left else copy.copy(error)
            self.phase = ENDED[self.phase]

    # ---- what is handed out --------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be handed out than what is there."""
        return self.is_left or self.error is not None or self.phase is Phase.ENDED

    @property
    def is_spent(self) -> bool:
        """Whether nothing more will be handed out."""
        return self.is_left or (self.is_over and not self._events)

    @property
    def is_cut(self) -> bool:
        return self.role is Role.CUT

    @property
    def is_end(self) -> bool:
        return self.role is Role.END

    @property
    def is_passing(self) -> bool:
        return self.role is Role.PASSING

    @property
    def is_held(self) -> bool:
        """Whether a cut that may undo it is on its way."""
        return self.phase in RELEASED

    @property
    def has_reader(self) -> bool:
        """Whether what comes will be handed out."""
        return not self.is_left and self.phase in ENDED

    @property
    def generates(self) -> bool:
        """Whether it asks for tokens."""
        return self.options.get("max_tokens") != 0

    @property
    def start(self) -> int | None:
        """Absolute position of its first token; None before that has come."""
        return self._received.start

    @property
    def ids(self) -> list[int]:
        """All tokens that have come."""
        return self._received.ids

    @property
    def texts(self) -> list[str]:
        """The text that came with each of them."""
        return self._received.texts

    @property
    def is_behind(self) -> bool:
        """Whether it was sent again and its answer has not yet come as far as before."""
        return self._received.is_behind

    @property
    def end(self) -> int:
        """The position behind what was handed out; of a turn with a start."""
        assert self.start is not None
        return self.start + self.num_handed

    def give_up(self, error: MicroturnError) -> None:
        """Its user waits no longer, also not for an end that is held, and is told why."""
        if self.has_reader or (self.phase is Phase.HELD_ENDED and not self.is_over):
            self.error = copy.copy(error)
            self.phase = ENDED.get(self.phase, self.phase)
        self.leave()

    def leave(self) -> None:
        """Its user left: drops what is there and hands nothing more out. Safe from any thread, also without a lock."""
        self.is_left = True

    def next_event(self) -> Event | None:
        """The oldest event not handed out yet; None when there is none now, or, once ``is_over``, none any more.

        Raises:
            MicroturnError: when the turn failed, after the events that came before.
        """
        if self.is_left:
            self._events.clear()
        elif self._events and not self.is_held:
            event = self._events.popleft()
            if isinstance(event, Tokens):
                self.num_handed += len(event.ids)
                self.handed.append(event)
            return event
        if self.error is not None:
            # A copy: the traceback of the error that is kept would keep the reader's frames, and the session with them.
            raise copy.copy(self.error)
        return None

    # ---- what is done with it ------------------------------------------------------------------------------------

    def hold(self) -> None:
        """A cut that may undo it is on its way."""
        self.phase = HELD.get(self.phase, self.phase)

    def release(self) -> None:
        """No cut will undo it."""
        self.phase = RELEASED.get(self.phase, self.phase)

    def send_again(self) -> None:
        """It will be sent once more as it was, or where the session was opened anew; its answer begins anew."""
        self._received.begin_again()

    def redo(self) -> None:
        """It was undone by an interrupt of a turn before it, and begins from nothing."""
        self.number, self.result = None, None
        self._received = ReceivedAnswer(self._tool_names)
        self.num_handed = 0
        self.handed.clear()
        self.is_settled = False
        self.num_undone += 1
        self.limit = None
        self.phase = Phase.ENDED
        if self.error is None:
            self.phase = Phase.OPEN
            self._events.clear()

    def has_input_there(self) -> None:
        """Its input is in the context already; to be done again, it only goes on."""
        self.tensor = encode_input(None)

    def limit_to(self, num_tokens: int) -> None:
        """Only its first tokens count."""
        self.limit = num_tokens if self.limit is None else min(self.limit, num_tokens)
        self._events = deque(counted for event in self._events for counted in self._limited(event))

    def fix_options(self) -> None:
        """It is sent under a new number: no more is asked for than is still wanted of it."""
        caps = [0] if self.role is Role.SILENT else [] if self.limit is None else [self.limit]
        caps += [self.num_handed] if self.is_left else []
        asked = self.options.get("max_tokens")
        if caps and isinstance(asked, int):
            self.sent_options = {**self.options, "max_tokens": min(asked, *caps)}
        else:
            self.sent_options = dict(self.options)
