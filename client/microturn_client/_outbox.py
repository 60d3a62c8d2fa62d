"""The turns of one session that have no answer yet: those to be sent, those on the wire, and the numbers they have.

Turns are numbered in the order in which they are sent, so that each is done once however often it is sent. One that is
refused gives its number back; those behind it on the wire will be refused as well, since they leave a gap, and are then
sent again under other numbers. Nothing is sent while the wire has such turns. Knows no requests and no answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from microturn_client._errors import MicroturnError
from microturn_client._pending_turn import PendingTurn

# So many turns of the program's are on the wire at once; a server lets as many wait unless it is set otherwise. Without
# numbers a turn that is refused for want of room could be overtaken: one runs and one waits, which any server allows.
_MAX_SENT = 8
_MAX_SENT_UNNUMBERED = 2

# So many turns that were undone are on the wire at once; a server lets at least as many wait.
_MAX_UNDONE = 4


class Outbox:
    """Turns in their order.

    Attributes:
        next_number: of the next turn that is numbered.
        retry_at: nothing is sent before that time, or before a turn has its answer, since the server had no room for
            one; None when it has.

    Args:
        is_numbered: whether turns are numbered at all.
    """

    def __init__(self, *, is_numbered: bool) -> None:
        self.next_number = 0
        self.retry_at: float | None = None
        self._is_numbered = is_numbered
        self._unsent: deque[PendingTurn] = deque()
        self._sent: dict[str, PendingTurn] = {}
        self._refused_for_gap: list[PendingTurn] = []

    def __iter__(self) -> Iterator[PendingTurn]:
        """All turns without an answer, in their order."""
        yield from (*self._sent.values(), *self._refused_for_gap, *self._unsent)

    @property
    def sent(self) -> list[PendingTurn]:
        """The turns on the wire, in their order."""
        return list(self._sent.values())

    @property
    def first_sent(self) -> PendingTurn | None:
        """The first turn of a user's on the wire."""
        return next((turn for turn in self._sent.values() if not turn.is_passing), None)

    @property
    def has_sent_any(self) -> bool:
        """Whether any turn is on the wire."""
        return bool(self._sent)

    def put(self, turn: PendingTurn) -> None:
        """Adds a turn behind all others."""
        self._unsent.append(turn)

    def put_first(self, turns: list[PendingTurn]) -> None:
        """Adds turns before all that were never sent."""
        again = [turn for turn in self._unsent if turn.number is not None]
        new = [turn for turn in self._unsent if turn.number is None]
        self._unsent = deque([*again, *turns, *new])

    def remove_unsent(self, turn: PendingTurn) -> bool:
        """Takes a turn out, unless it was sent; says whether it did."""
        for turns in (self._unsent, self._refused_for_gap):
            if turn in turns and turn.number is None:
                turns.remove(turn)
                return True
        return False

    def give_up(self, turn: PendingTurn, error: MicroturnError) -> None:
        """A turn's user waits no longer: what was not sent never is, nor the message that it would have answered.

        An interrupt is, since turns are held for it, and what it cuts off was not handed out.
        """
        turn.give_up(error)
        if turn.is_cut or not self.remove_unsent(turn) or turn.follows is None:
            return
        if self.remove_unsent(turn.follows):
            turn.follows.give_up(error)

    def next_turn(self) -> PendingTurn | None:
        """The turn to be sent now; None when there is none, or it has to wait."""
        is_doomed = any(turn.number is not None and turn.number >= self.next_number for turn in self._sent.values())
        if is_doomed:
            return None
        if self._refused_for_gap:
            self._unsent.extendleft(reversed(self._refused_for_gap))
            self._refused_for_gap.clear()
        turn = self._unsent[0] if self._unsent else None
        return None if turn is not None and turn.num_undone and len(self._sent) >= _MAX_UNDONE else turn

    def turn_to_send(self) -> PendingTurn | None:
        """As ``next_turn``, where the server has room for it; one fails here whose turn before it was refused."""
        while (turn := self.next_turn()) is not None and turn.follows is not None:
            if turn.follows.error is not None:
                self.remove_unsent(turn)
                turn.fail(turn.follows.error)
            elif turn.number is None and turn.follows.result is None and not self._is_numbered:
                return None  # without numbers the server would do it though the turn before it is refused
            else:
                break
        return None if turn is None or self._is_full(turn) else turn

    def _is_full(self, turn: PendingTurn) -> bool:
        """Whether the next turn has to wait until the server has room for it."""
        if any(waiting.is_end or waiting.options.get("on_overlap") == "interrupt" for waiting in self._unsent):
            return False  # one that ends those before it does not wait behind them
        num_sent = sum(not (sent.is_passing or sent.is_cut) for sent in self._sent.values())
        is_new = turn.number is None
        most = _MAX_SENT if self._is_numbered else _MAX_SENT_UNNUMBERED
        return (is_new and num_sent >= most) or self.retry_at is not None

    def tick(self, now: float) -> None:
        """Tries again when it is time."""
        if self.retry_at is not None and now >= self.retry_at:
            self.retry_at = None

    def number(self, turn: PendingTurn) -> None:
        """Gives a turn that is about to be sent its number, unless it has one, and its options for the wire."""
        if turn.number is not None:
            return
        turn.fix_options()
        if self._is_numbered and not turn.is_passing and not turn.is_end:
            turn.number = self.next_number
            self.next_number += 1

    def has_sent(self, turn: PendingTurn, request_id: str) -> None:
        """The next turn is on the wire."""
        if self._unsent and self._unsent[0] is turn:
            self._unsent.popleft()
        self._sent[request_id] = turn

    def find(self, request_id: str) -> PendingTurn | None:
        """The turn on the wire that a request id belongs to."""
        return self._sent.get(request_id)

    def is_first(self, request_id: str) -> bool:
        """Whether all that was sent before has an answer."""
        return next(iter(self._sent), None) == request_id

    def is_answered(self, request_id: str) -> None:
        """A turn on the wire has come to its end."""
        del self._sent[request_id]

    def is_void(self, turn: PendingTurn) -> None:
        """A turn was refused or undone: its number is free."""
        if turn.number is not None:
            self.next_number = min(self.next_number, turn.number)

    def left_gap(self, turn: PendingTurn, expected: int) -> None:
        """A turn was refused for want of room, or since one before it was: it is sent again, as ``expected``."""
        turn.number = None
        self._refused_for_gap.append(turn)
        self.next_number = expected

    def is_broken(self) -> None:
        """What is on the wire will not be answered: it is sent again, first of all and under the same numbers."""
        again = [turn for turn in (*self._sent.values(), *self._refused_for_gap) if not turn.is_passing]
        self._unsent.extendleft(reversed(again))
        self._sent.clear()
        self._refused_for_gap.clear()
        self.retry_at = None
        for turn in again:
            turn.send_again()

    def replace_unsent(self, turns: list[PendingTurn], next_number: int) -> None:
        """Where the session was opened anew: these turns are sent, under new numbers."""
        self._unsent = deque(turns)
        self.next_number = next_number
        for turn in turns:
            turn.number = None

    def give_up_unsent(self) -> list[PendingTurn]:
        """Gives up all turns that wait to be sent, but for the end of the session, and returns them."""
        turns = [turn for turn in (*self._refused_for_gap, *self._unsent) if not turn.is_end]
        self._refused_for_gap.clear()
        self._unsent = deque(turn for turn in self._unsent if turn.is_end)
        return turns

    def clear(self) -> list[PendingTurn]:
        """Gives up all turns, and returns them."""
        turns = list(self)
        self._unsent.clear()
        self._sent.clear()
        self._refused_for_gap.clear()
        return turns
