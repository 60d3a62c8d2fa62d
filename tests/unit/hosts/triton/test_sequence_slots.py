"""The count of Triton's sequence slots, beside a Triton that keeps sequences as the real one does."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microturn.hosts.triton.sequence_slots import MAX_WAIT_S, Control, SequenceSlots
from support.clock import Clock

NUM_SLOTS = 16
NUM_KEPT = 2


class Triton:
    """Sequences, the requests on their way to the model, and what the model does with them.

    Attributes:
        sequences: the ids that have a slot.
        refused: answers that have reached their client, in order.
        num_refused: how many there should be in the end.
        sessions: those that the engine has.
    """

    def __init__(self) -> None:
        self.clock = Clock()
        self.slots = SequenceSlots(NUM_SLOTS, lambda *order: self.orders.append(order), self.clock)
        self.sequences: set[int] = set()
        self.orders: deque[tuple[int, Control]] = deque()
        self.under_way: deque[tuple[int, Control, bool]] = deque()
        self.refused: list[int] = []
        self.num_refused = 0
        self.sessions: set[int] = set()

    def send(self, session_id: int, control: Control, *, is_ours: bool = False) -> bool:
        """Triton takes a request, or refuses it."""
        if control is Control.END and session_id not in self.sequences:
            return False
        if control is Control.END:
            self.sequences.discard(session_id)
        else:
            self.sequences.add(session_id)
        self.under_way.append((session_id, control, is_ours))
        return True

    def take_order(self) -> None:
        """The next control request goes out."""
        session_id, control = self.orders.popleft()
        if not self.send(session_id, control, is_ours=True):
            self.slots.failed(session_id)

    def execute(self, *, opens: bool) -> None:
        """The next request reaches the model; a client's START opens a session, or is refused."""
        session_id, control, is_ours = self.under_way.popleft()
        if is_ours:
            self.slots.arrived(session_id, control)
        elif control is Control.END:
            self.slots.end_seen(session_id)
            self.end(session_id)
        else:
            self.slots.start_seen(session_id)
            self.decide(session_id, opens=opens)

    def decide(self, session_id: int, *, opens: bool) -> None:
        """The engine opens a session for a START, or refuses it."""
        if opens:
            self.end(session_id)
            self.sessions.add(session_id)
            self.slots.session_opened(SimpleNamespace(id=session_id))
            self.slots.accepted(session_id)
        else:
            self.num_refused += 1
            self.slots.refused(session_id, lambda: self.refused.append(session_id))

    def end(self, session_id: int) -> None:
        """A session ends in the engine."""
        if session_id in self.sessions:
            self.sessions.remove(session_id)
            self.slots.session_ended(SimpleNamespace(id=session_id), "closed")

    def settle(self) -> None:
        """Until nothing is under way any more."""
        for _ in range(1000):
            if self.orders:
                self.take_order()
            elif self.under_way:
                self.execute(opens=False)
            else:
                return
        pytest.fail("control requests without an end")


@pytest.fixture
def triton() -> Triton:
    return Triton()


def refuse_start(triton: Triton, session_id: int) -> None:
    assert triton.send(session_id, Control.START)
    triton.execute(opens=False)


def open_session(triton: Triton, session_id: int) -> None:
    assert triton.send(session_id, Control.START)
    triton.execute(opens=True)


def test_a_refusal_waits_until_its_sequence_has_ended(triton: Triton) -> None:
    refuse_start(triton, 1)
    assert triton.slots.count() == {"session": 0, "ended": 0, "ending": 1}
    triton.take_order()
    assert triton.sequences == set()
    assert triton.refused == []
    triton.execute(opens=False)
    assert triton.refused == [1]
    assert triton.slots.count() == {"session": 0, "ended": 0, "ending": 0}


def test_a_refusal_does_not_wait_for_ever(triton: Triton) -> None:
    refuse_start(triton, 1)
    triton.clock.now_s += MAX_WAIT_S / 2
    refuse_start(triton, 2)
    triton.slots.release_overdue()
    assert triton.refused == []
    triton.clock.now_s += MAX_WAIT_S / 2
    triton.slots.release_overdue()
    assert triton.refused == [1]
    triton.settle()
    assert triton.refused == [1, 2]
    assert triton.sequences == set()


def test_a_refused_start_on_a_session_that_lives_leaves_it_alone(triton: Triton) -> None:
    open_session(triton, 1)
    refuse_start(triton, 1)
    assert triton.refused == [1]
    triton.settle()
    assert triton.sequences == {1}


def test_an_end_by_the_client_needs_no_second(triton: Triton) -> None:
    open_session(triton, 1)
    triton.send(1, Control.END)
    triton.execute(opens=False)
    assert not triton.orders
    assert triton.slots.count() == {"session": 0, "ended": 0, "ending": 0}


def test_sequences_of_ended_sessions_are_kept_up_to_a_number(triton: Triton) -> None:
    """Their clients are told EXPIRED as long as Triton knows the sequence."""
    for session_id in range(5):
        open_session(triton, session_id)
    for session_id in range(5):
        triton.end(session_id)
    assert triton.slots.count() == {"session": 0, "ended": NUM_KEPT, "ending": 3}
    triton.settle()
    assert triton.sequences == {3, 4}
    assert triton.slots.count() == {"session": 0, "ended": NUM_KEPT, "ending": 0}


def test_a_start_on_a_kept_sequence_keeps_it(triton: Triton) -> None:
    open_session(triton, 1)
    triton.end(1)
    open_session(triton, 1)
    for session_id in (2, 3, 4):
        open_session(triton, session_id)
        triton.end(session_id)
    triton.settle()
    assert triton.sequences == {1, 3, 4}


@pytest.mark.parametrize("end_is_first", [True, False])
def test_a_start_beside_our_end_gets_its_sequence_back(triton: Triton, end_is_first: bool) -> None:
    """A client that does not wait for the refusal, or that opens an id anew just as its sequence is given back."""
    refuse_start(triton, 1)
    if end_is_first:
        triton.take_order()
        triton.send(1, Control.START)
        triton.under_way.rotate()  # in another slot it may come to the model first
    else:
        triton.send(1, Control.START)
        triton.take_order()
    triton.execute(opens=True)
    assert triton.sequences == ({1} if end_is_first else set())
    triton.settle()
    assert triton.sequences == {1}
    assert triton.refused == [1]
    assert triton.slots.count() == {"session": 1, "ended": 0, "ending": 0}


def test_pipelined_starts_that_are_all_refused_hold_nothing(triton: Triton) -> None:
    for _ in range(5):
        triton.send(1, Control.START)
    while triton.under_way:
        triton.execute(opens=False)
    triton.settle()
    assert triton.sequences == set()
    assert triton.refused == [1] * 5


def test_a_slot_that_triton_took_back_by_itself_is_forgotten(triton: Triton) -> None:
    refuse_start(triton, 1)
    triton.sequences.clear()
    triton.settle()
    assert triton.refused == [1]
    assert triton.slots.count() == {"session": 0, "ended": 0, "ending": 0}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "end", "order", "execute", "execute", "refuse", "expire", "swap"]),
        st.integers(1, 4),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_happens_the_living_have_a_sequence_and_few_others_do(steps: list[tuple[str, int]]) -> None:
    """Requests of one id may overtake each other on their way, where they are in different slots."""
    triton = Triton()
    for step, session_id in steps:
        if step == "start":
            triton.send(session_id, Control.START)
        elif step == "end":
            triton.send(session_id, Control.END)
        elif step == "order" and triton.orders:
            triton.take_order()
        elif step in ("execute", "refuse") and triton.under_way:
            triton.execute(opens=step == "execute")
        elif step == "expire":
            triton.end(session_id)
        elif step == "swap" and len(triton.under_way) > 1:
            swap_unless_order_matters(triton)
    triton.settle()
    assert triton.sessions <= triton.sequences
    assert len(triton.sequences - triton.sessions) <= NUM_KEPT
    count = triton.slots.count()
    assert count == {"session": len(triton.sessions), "ended": len(triton.sequences - triton.sessions), "ending": 0}
    assert triton.num_refused == len(triton.refused)


def swap_unless_order_matters(triton: Triton) -> None:
    """A START after an END gets another slot, and may come to the model before it. All else of an id stays in order."""
    first, second = triton.under_way[0], triton.under_way[1]
    if first[0] != second[0] or (first[1] is Control.END and second[1] is Control.START):
        triton.under_way[0], triton.under_way[1] = second, first
