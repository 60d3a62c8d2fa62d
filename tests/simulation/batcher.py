"""Triton's sequence batcher, `oldest`, as it was measured: who has a candidate slot, who waits for one in silence.

    START ──► a slot is free ──► one request of each sequence per execute ──► END dispatched: the slot is free again
          └─► none is: the sequence waits behind the others that wait, for as long as it takes

A sequence that is silent for the idle time loses its slot, and nobody is told. A request whose client has gone while it
was still here ends its sequence. Knows no model and no messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

SequenceId = int | str

NEEDS_START = (
    "inference request for sequence {} to model 'streaming_llm' must specify the START flag on the first request of "
    "the sequence"
)


class Queued(Protocol):
    """A request, as far as the batcher knows it."""

    @property
    def sequence_id(self) -> SequenceId: ...

    @property
    def starts(self) -> bool: ...

    @property
    def ends(self) -> bool: ...

    @property
    def is_cancelled(self) -> bool: ...


R = TypeVar("R", bound=Queued)


@dataclass(eq=False)
class Sequence(Generic[R]):
    """A sequence that has a slot, or waits for one.

    Attributes:
        has_ended: END is among its requests, or has been dispatched.
    """

    id: SequenceId
    last_arrival_s: float
    queued: deque[R] = field(default_factory=deque)
    has_ended: bool = False


class SequenceBatcher(Generic[R]):
    """The sequences of one model.

    Attributes:
        slots: those that have one.
        backlog: those that wait for one.

    Args:
        num_slots: `max_candidate_sequences`.
        idle_s: `max_sequence_idle_microseconds`.
        refuse: answers a request with an error.
        end_empty: answers a request with an empty last response.
    """

    def __init__(
        self, num_slots: int, idle_s: float, refuse: Callable[[R, str], None], end_empty: Callable[[R], None]
    ) -> None:
        self.slots: list[Sequence[R]] = []
        self.backlog: deque[Sequence[R]] = deque()
        self._num_slots = num_slots
        self._idle_s = idle_s
        self._refuse = refuse
        self._end_empty = end_empty
        self._by_id: dict[SequenceId, Sequence[R]] = {}

    def put(self, request: R, now_s: float) -> None:
        """A request has come."""
        sequence = self._by_id.get(request.sequence_id)
        if sequence is None:
            if not request.starts:
                self._refuse(request, NEEDS_START.format(request.sequence_id))
                return
            sequence = self._by_id[request.sequence_id] = Sequence(request.sequence_id, now_s)
            self.backlog.append(sequence)
        sequence.queued.append(request)
        sequence.last_arrival_s = now_s
        if request.ends:
            sequence.has_ended = True
            del self._by_id[sequence.id]
        self._fill_slots()

    def take(self) -> list[R]:
        """The requests of one execute: at most one of a sequence."""
        batch = []
        for sequence in list(self.slots):
            if not sequence.queued:
                continue
            request = sequence.queued.popleft()
            if request.is_cancelled:
                self._end_empty(request)
                self._drop(sequence)
                continue
            batch.append(request)
            if request.ends:
                self.slots.remove(sequence)
        self._fill_slots()
        return batch

    def reap(self, now_s: float) -> None:
        """Ends the sequences of which nothing has come for the idle time."""
        for sequence in [one for one in self.slots if one.last_arrival_s + self._idle_s <= now_s]:
            self._drop(sequence)
        self._fill_slots()

    def give_up(self, request: R, why: str) -> None:
        """A request's time has passed; it counts only for one that still waits for a slot."""
        for sequence in list(self.backlog):
            if request in sequence.queued:
                sequence.queued.remove(request)
                self._refuse(request, why)
                if not sequence.queued:
                    self.backlog.remove(sequence)
                    self._by_id.pop(sequence.id, None)

    @property
    def has_ready(self) -> bool:
        """Whether `take` has something to give."""
        return any(sequence.queued for sequence in self.slots)

    def find(self, sequence_id: SequenceId) -> Sequence[R] | None:
        """A sequence that Triton knows."""
        return self._by_id.get(sequence_id)

    def _drop(self, sequence: Sequence[R]) -> None:
        self.slots.remove(sequence)
        if self._by_id.get(sequence.id) is sequence:
            del self._by_id[sequence.id]
        for request in sequence.queued:
            self._refuse(request, NEEDS_START.format(sequence.id))
        sequence.queued.clear()

    def _fill_slots(self) -> None:
        while self.backlog and len(self.slots) < self._num_slots:
            self.slots.append(self.backlog.popleft())
