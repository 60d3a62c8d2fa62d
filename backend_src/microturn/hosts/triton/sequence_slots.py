"""Tracks which of Triton's sequence slots are taken, and which must be released.

Triton's sequence batcher takes a slot at a START and releases it at an END, whatever the model answers, and does not
notify the model. A slot is left without a session if the engine refuses a START, and if a session ends by itself
(expired, moved). The model releases such slots by sending control requests to itself. This file decides which are due,
from what the model sees, what the engine reports, and the outcome of the control requests:

    client's START ──▶ open ──── client's END ──▶ forgotten
                        │ ▲
      not wanted    │ │  a client's START came meanwhile: send our own START, since our END may have come after it
                        ▼ │
                    END ordered ── arrived ──▶ forgotten; the refusals that waited for it go out

A refusal waits because its client may send START with the same id at once, and our END must not end that sequence. A
sequence whose session ended by itself is kept while slots are free, so that a returning client gets EXPIRED.

All methods may be called on any thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntFlag

from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId

# How long a refusal waits for its sequence to end. If it is sent before the END, a client may open the same id again
# and find its sequence ended a moment later; START with `resume` recovers from that.
MAX_WAIT_S = 0.5


class Control(IntFlag):
    """Triton's sequence flags of a request."""

    START = 1
    END = 2


@dataclass(slots=True)
class _Sequence:
    """The state of one sequence id.

    Attributes:
        is_open: whether Triton holds a slot for it.
        is_restarted: whether a START came while it was open: an END may then be older than that START.
        has_session: whether the engine has its session.
        num_undecided: STARTs that the engine has not yet accepted or refused.
        ordered: the control request in flight.
        is_overtaken: whether a client's START or END came after it was ordered.
        waiting: answers that wait until it arrives, each with its time of arrival.
    """

    is_open: bool = False
    is_restarted: bool = False
    has_session: bool = False
    num_undecided: int = 0
    ordered: Control | None = None
    is_overtaken: bool = False
    waiting: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    @property
    def is_wanted(self) -> bool:
        """Whether a client may continue it."""
        return self.has_session or self.num_undecided > 0

    @property
    def is_known(self) -> bool:
        """Whether its state must be kept."""
        return self.is_open or self.is_wanted or self.ordered is not None or bool(self.waiting)


class SequenceSlots:
    """The state of Triton's sequence slots.

    Args:
        num_slots: how many Triton has.
        order: sends a control request; afterwards `arrived` or `failed` is called once.
        clock: seconds, monotonic.
    """

    def __init__(
        self, num_slots: int, order: Callable[[SessionId, Control], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_slots = num_slots
        self._max_kept = num_slots // 8
        self._order = order
        self._clock = clock
        self._lock = threading.Lock()
        self._sequences: dict[SessionId, _Sequence] = {}
        # Open, not wanted, and not ordered to end; longest first.
        self._kept: dict[SessionId, None] = {}
        # Sequences with waiting answers, by the time of the first answer.
        self._awaited: dict[SessionId, None] = {}

    # ---- what the model sees -------------------------------------------------------------------------------------

    def start_seen(self, session_id: SessionId) -> None:
        """A client's START has come, without END; `accepted` or `refused` follows."""
        with self._changing(session_id) as sequence:
            sequence.is_restarted = sequence.is_open
            sequence.is_open = sequence.is_overtaken = True
            sequence.num_undecided += 1

    def end_seen(self, session_id: SessionId) -> None:
        """A client's END has come: Triton has released the slot, unless a START has come in between."""
        with self._changing(session_id) as sequence:
            if sequence.is_restarted and sequence.ordered is None:
                self._send(session_id, sequence, Control.END)
            else:
                sequence.is_open, sequence.is_overtaken = False, True

    # ---- what the engine says ------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        """See `SessionWatcher`."""
        with self._changing(session.id) as sequence:
            sequence.has_session = True

    def session_ended(self, session: Session, reason: str) -> None:
        """See `SessionWatcher`."""
        with self._changing(session.id) as sequence:
            sequence.has_session = False

    def accepted(self, session_id: SessionId) -> None:
        """A START has its first answer, which is not a refusal."""
        with self._changing(session_id) as sequence:
            sequence.num_undecided -= 1

    def refused(self, session_id: SessionId, answer: Callable[[], None]) -> None:
        """A START is refused.

        Args:
            answer: sends the refusal; called when the sequence has ended, or now if it continues.
        """
        with self._changing(session_id) as sequence:
            sequence.num_undecided -= 1
            must_end = sequence.is_open and not sequence.is_wanted
            if must_end:
                sequence.waiting.append((self._clock(), answer))
                self._awaited.setdefault(session_id)
                if sequence.ordered is None:
                    self._send(session_id, sequence, Control.END)
        if not must_end:
            answer()

    # ---- outcomes of control requests ----------------------------------------------------------------------------

    def arrived(self, session_id: SessionId, control: Control) -> None:
        """A control request has reached the model: Triton has applied it."""
        with self._changing(session_id) as sequence:
            sequence.ordered = None
            if not sequence.is_overtaken:
                sequence.is_open = control is Control.START
            # Triton may have seen the two in the other order. Repeating the client's is right either way.
            elif sequence.is_open and control is Control.END:
                self._send(session_id, sequence, Control.START if sequence.is_wanted else Control.END)
            elif not sequence.is_open and control is Control.START:
                self._send(session_id, sequence, Control.END)
            answers = [] if sequence.ordered is Control.END else self._take_waiting(session_id, sequence)
        _tell(answers)

    def failed(self, session_id: SessionId) -> None:
        """Triton has refused a control request: the sequence has ended already, or no slot is free."""
        with self._changing(session_id) as sequence:
            sequence.ordered = None
            if not sequence.is_overtaken:
                sequence.is_open = False
            answers = self._take_waiting(session_id, sequence)
        _tell(answers)

    def release_overdue(self, max_wait_s: float = MAX_WAIT_S) -> None:
        """Sends answers that have waited for longer than `max_wait_s`."""
        latest_s = self._clock() - max_wait_s
        answers = []
        with self._lock:
            for session_id in list(self._awaited):
                sequence = self._sequences[session_id]
                if sequence.waiting[0][0] > latest_s:
                    break
                answers += self._take_waiting(session_id, sequence)
        _tell(answers)

    def count(self) -> dict[str, int]:
        """Slots in use: of sessions and undecided STARTs, kept for ended sessions, and being released."""
        with self._lock:
            open_ones = [sequence for sequence in self._sequences.values() if sequence.is_open]
            num_wanted, num_kept = sum(sequence.is_wanted for sequence in open_ones), len(self._kept)
            return {"session": num_wanted, "ended": num_kept, "ending": len(open_ones) - num_wanted - num_kept}

    # ---- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, session_id: SessionId) -> Iterator[_Sequence]:
        """Changes the state of an id, then keeps, ends or forgets sequences that are not wanted."""
        with self._lock:
            sequence = self._sequences.setdefault(session_id, _Sequence())
            yield sequence
            if sequence.is_open and not sequence.is_wanted and sequence.ordered is None:
                self._kept.setdefault(session_id)
            else:
                self._kept.pop(session_id, None)
            if len(self._kept) > self._max_kept:
                longest = next(iter(self._kept))
                del self._kept[longest]
                self._send(longest, self._sequences[longest], Control.END)
            if not sequence.is_known:
                del self._sequences[session_id]

    def _send(self, session_id: SessionId, sequence: _Sequence, control: Control) -> None:
        sequence.ordered, sequence.is_overtaken = control, False
        self._order(session_id, control)

    def _take_waiting(self, session_id: SessionId, sequence: _Sequence) -> list[Callable[[], None]]:
        answers = [answer for _, answer in sequence.waiting]
        sequence.waiting = []
        self._awaited.pop(session_id, None)
        return answers


def _tell(answers: list[Callable[[], None]]) -> None:
    for answer in answers:
        answer()
