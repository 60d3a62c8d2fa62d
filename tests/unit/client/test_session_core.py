import math

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from microturn_client import (
    ConnectionLost,
    Expired,
    InvalidArgument,
    MicroturnError,
    NotFound,
    SessionClosed,
    TurnEnd,
    TurnTimeout,
    Unavailable,
)
from microturn_client._inputs import encode_input
from microturn_client._lifecycle import SessionState
from microturn_client._new_turn import begin_ask
from microturn_client._requests import Requests
from microturn_client._session_core import SessionCore
from microturn_client._timeouts import KEEPALIVE_SHARE, Timeouts
from support.clock import Clock

IDS = encode_input([1, 2, 3])
EMPTY = encode_input(None)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def new_core(clock):
    return lambda **options: SessionCore(Requests("streaming_llm", 5, options), clock)


@pytest.fixture
def core(new_core):
    return new_core()


def events(turn):
    return list(iter(turn.next_event, None))


def begin(core, tensor=IDS, timeout_s=math.inf, **options):
    return core.begin_turn(tensor, options, timeout_s)


@pytest.fixture
def open_core(core, wire):
    begin(core)
    [start] = core.requests_to_send()
    core.receive(wire.message(start.id, end=wire.status()))
    return core


def test_the_first_turn_is_start_and_carries_the_sessions_options(new_core, wire):
    core = new_core(idle_timeout_s=30, temperature=0.7)
    begin(core)
    [request] = core.requests_to_send()
    assert wire.flags(request) == (True, False)
    assert wire.option(request, "idle_timeout_s") == 30
    assert wire.option(request, "temperature") == 0.7
    assert core.lifecycle.state is SessionState.OPENING


def test_later_turns_are_neither_start_nor_end(open_core, wire):
    begin(open_core)
    [request] = open_core.requests_to_send()
    assert wire.flags(request) == (False, False)
    assert wire.option(request, "sequence_id") == 5


def test_request_ids_are_used_once(open_core):
    begin(open_core)
    begin(open_core)
    first, second = open_core.requests_to_send()
    assert first.id != second.id
    assert open_core.requests_to_send() == []


def test_turns_wait_until_start_is_answered(core, wire):
    begin(core)
    begin(core)
    [start] = core.requests_to_send()
    assert core.requests_to_send() == []
    core.receive(wire.message(start.id, ids=(5,), position=3))
    assert core.lifecycle.state is SessionState.OPEN
    [second] = core.requests_to_send()
    assert wire.flags(second) == (False, False)


def test_when_start_is_refused_the_next_turn_is_start(core, wire):
    first, second = begin(core), begin(core)
    [start] = core.requests_to_send()
    core.receive(wire.error(start.id, "INVALID_ARGUMENT: no"))
    with pytest.raises(InvalidArgument):
        first.next_event()
    [again] = core.requests_to_send()
    assert wire.flags(again) == (True, False)
    core.receive(wire.message(again.id, end=wire.status(context_len=9)))
    assert isinstance(events(second)[-1], TurnEnd)
    assert core.context_len == 9


def test_each_turn_sees_its_own_events_only(open_core, wire):
    one, two = begin(open_core), begin(open_core)
    first, second = open_core.requests_to_send()
    open_core.receive(wire.message(first.id, ids=(5,), position=0, end=wire.status(turn=1)))
    open_core.receive(wire.message(second.id, ids=(6,), position=1))
    assert [event.ids for event in events(one)[:-1]] == [(5,)]
    assert [event.ids for event in events(two)] == [(6,)]


def test_ids_that_begin_alike_are_different(open_core, wire):
    """Of 19 turns that are all on the wire, as those that interrupt are."""
    turns = [begin(open_core, on_overlap="interrupt") for _ in range(19)]
    requests = open_core.requests_to_send()
    assert (requests[0].id, requests[-1].id) == ("2", "20")
    open_core.receive(wire.error(requests[-1].id, "INTERNAL: no"))
    assert [turn.is_over for turn in turns] == [False] * 18 + [True]


def test_what_belongs_to_no_turn_is_dropped(open_core, wire):
    turn = begin(open_core)
    [request] = open_core.requests_to_send()
    open_core.receive(wire.message("nobody", ids=(5,), end=wire.status(context_len=99)))
    open_core.receive(wire.message(request.id, end=wire.status()))
    open_core.receive(wire.message(request.id, ids=(5,), end=wire.status(context_len=99)))
    assert len(events(turn)) == 1
    assert open_core.context_len == 7


def test_an_error_that_names_no_turn_ends_them_all(open_core, wire):
    turn = begin(open_core)
    open_core.requests_to_send()
    open_core.receive(wire.error("", "UNAVAILABLE: stopping"))
    with pytest.raises(Unavailable):
        turn.next_event()
    assert open_core.lifecycle.state is SessionState.LOST


def test_context_len_and_seed_are_those_of_the_last_status(core, wire):
    assert (core.context_len, core.seed) == (0, None)
    turn = begin(core)
    [request] = core.requests_to_send()
    turn.leave()
    core.receive(wire.message(request.id, end=wire.status(context_len=12, seed=77)))
    assert (core.context_len, core.seed) == (12, 77)


class TestOptions:
    def test_what_the_first_turn_says_is_taken_back_by_the_next(self, core, wire):
        """On the wire START's options become the session's: a first ``append`` made every later turn silent."""
        begin(core, max_tokens=0, temperature=0.9, stop=["x"], return_appended_ids=True)
        [start] = core.requests_to_send()
        core.receive(wire.message(start.id, end=wire.status()))
        begin(core, stop=["y"])
        [request] = core.requests_to_send()
        assert wire.option(request, "max_tokens") == 16
        assert wire.option(request, "temperature") == 0.0
        assert wire.option(request, "return_appended_ids") is False
        assert wire.option(request, "stop") == '["y"]'

    def test_the_sessions_value_stands_again_after_the_first_turn(self, new_core, wire):
        core = new_core(temperature=0.5, seed=1, top_k=3)
        begin(core, temperature=0.9, seed=2)
        [start] = core.requests_to_send()
        assert (wire.option(start, "temperature"), wire.option(start, "seed")) == (0.9, 2)
        core.receive(wire.message(start.id, end=wire.status()))
        begin(core)
        [request] = core.requests_to_send()
        assert (wire.option(request, "temperature"), wire.option(request, "seed")) == (0.5, 1)
        assert wire.option(request, "top_k") is None

    def test_the_key_is_said_with_every_turn(self, new_core, clock, wire):
        core = new_core(session_key="mine")
        begin(core)
        [start] = core.requests_to_send()
        core.receive(wire.message(start.id, end=wire.status()))
        begin(core)
        [later] = core.requests_to_send()
        core.receive(wire.message(later.id, end=wire.status()))
        clock.now_s += 60.0 * KEEPALIVE_SHARE
        core.tick()
        [keepalive] = core.requests_to_send()
        core.begin_close(5.0)
        [end] = core.requests_to_send()
        assert [wire.option(request, "session_key") for request in (start, later, keepalive, end)] == ["mine"] * 4

    def test_nothing_is_said_that_nobody_said(self, open_core):
        begin(open_core)
        [request] = open_core.requests_to_send()
        assert set(request.parameters) == {"sequence_id", "max_tokens", "triton_enable_empty_final_response"}

    @pytest.mark.parametrize(
        ("tensor", "session", "turn", "sent"),
        [
            (IDS, {}, {}, 16),
            (IDS, {"max_tokens": 4}, {}, 4),
            (IDS, {"max_tokens": 4}, {"max_tokens": 8}, 8),
            (IDS, {"max_tokens": 4}, {"max_tokens": 0}, 0),
            (IDS, {"max_tokens": 4}, {"max_tokens": None}, 4),
            (EMPTY, {"max_tokens": 4}, {}, 0),
            (EMPTY, {}, {"max_tokens": 8}, 8),
            (encode_input(""), {}, {}, 0),
        ],
    )
    def test_max_tokens_is_always_said(self, new_core, wire, tensor, session, turn, sent):
        core = new_core(**session)
        begin(core, tensor, **turn)
        [request] = core.requests_to_send()
        assert wire.option(request, "max_tokens") == sent

    @pytest.mark.parametrize(("session", "sent"), [({}, 16), ({"max_tokens": 4}, 4)])
    def test_an_answer_whose_length_is_left_open_is_as_long_as_any(self, new_core, wire, session, sent):
        core = new_core(**session)
        answer = begin_ask(core, IDS, {"max_tokens": None}, Timeouts(1.0))
        [message] = core.requests_to_send()
        core.receive(wire.message(message.id, end=wire.status(finish_reason="append")))
        [request] = core.requests_to_send()
        assert (answer.generates, wire.option(request, "max_tokens")) == (True, sent)

    @pytest.mark.parametrize("name", ["role", "traceparent"])
    def test_options_of_turns_alone_are_refused_for_a_session(self, new_core, name):
        with pytest.raises(InvalidArgument, match=name):
            new_core(**{name: "user"})

    @pytest.mark.parametrize(("name", "error"), [("priority", InvalidArgument), ("temperature", TypeError)])
    def test_options_without_a_form_on_the_wire_are_refused_at_once(self, new_core, open_core, name, error):
        with pytest.raises(error, match=name):
            new_core(**{name: object()})
        with pytest.raises(error, match=name):
            begin(open_core, **{name: object()})
        assert open_core.requests_to_send() == []


class TestEnds:
    def test_end_interrupts_the_turns_and_closes(self, open_core, wire):
        """It waited behind an answer that nobody read any more, until the time to close was over."""
        begin(open_core)
        [turn] = open_core.requests_to_send()
        end = open_core.begin_close(5.0)
        [closing] = open_core.requests_to_send()
        assert wire.flags(turn) == (False, False)
        assert wire.option(closing, "on_overlap") == "interrupt"
        assert wire.flags(closing) == (False, True)
        assert (closing.inputs[0].name, list(closing.inputs[0].shape)) == ("input_ids", [1, 0])
        assert wire.option(closing, "max_tokens") == 0
        open_core.receive(wire.message(closing.id, end=wire.status(finish_reason="closed")))
        assert open_core.lifecycle.state is SessionState.CLOSED
        assert events(end)[0].status.finish_reason == "closed"

    def test_what_has_no_answer_when_end_is_answered_gets_none(self, open_core, wire):
        """The answer to a cut was lost: whoever waited for it, or was held for it, waited for ever."""
        turn = begin(open_core)
        [request] = open_core.requests_to_send()
        open_core.receive(wire.message(request.id, ids=(5, 6), position=9))
        assert len(events(turn)) == 1
        cut = open_core.begin_interrupt(math.inf, heard_tokens=1)
        assert len(open_core.requests_to_send()) == 1
        open_core.begin_close(5.0)
        [closing] = open_core.requests_to_send()
        open_core.receive(wire.message(closing.id, end=wire.status(finish_reason="closed")))
        for waiting in (turn, cut):
            with pytest.raises(SessionClosed):
                events(waiting)

    def test_a_closing_session_takes_no_turns(self, open_core):
        open_core.begin_close(5.0)
        with pytest.raises(SessionClosed):
            begin(open_core)

    def test_closing_twice_sends_one_end(self, open_core):
        assert open_core.begin_close(5.0) is open_core.begin_close(5.0)
        assert len(open_core.requests_to_send()) == 1

    def test_a_session_that_never_began_closes_by_itself(self, core):
        assert core.begin_close(5.0) is None
        assert core.requests_to_send() == []
        with pytest.raises(SessionClosed):
            begin(core)

    def test_end_waits_for_start(self, core, wire):
        begin(core)
        [start] = core.requests_to_send()
        core.begin_close(5.0)
        assert core.requests_to_send() == []
        core.receive(wire.message(start.id, end=wire.status()))
        [end] = core.requests_to_send()
        assert wire.flags(end) == (False, True)

    def test_what_was_not_sent_when_the_session_is_closed_never_is(self, core, wire):
        sent, unsent = begin(core), begin(core)
        [start] = core.requests_to_send()
        core.begin_close(5.0)
        with pytest.raises(SessionClosed):
            unsent.next_event()
        core.receive(wire.message(start.id, end=wire.status()))
        [end] = core.requests_to_send()
        assert wire.flags(end) == (False, True)
        assert len(events(sent)) == 1

    def test_end_follows_a_refused_start_since_triton_holds_its_sequence(self, core, wire):
        begin(core)
        [start] = core.requests_to_send()
        core.receive(wire.error(start.id, "RESOURCE_EXHAUSTED: full"))
        end = core.begin_close(5.0)
        [closing] = core.requests_to_send()
        assert wire.flags(closing) == (False, True)
        core.receive(wire.error(closing.id, "NOT_FOUND: none"))
        assert core.lifecycle.state is SessionState.CLOSED
        with pytest.raises(NotFound):
            end.next_event()

    @pytest.mark.parametrize(("text", "kind"), [("EXPIRED: idle", Expired), ("NOT_FOUND: none", NotFound)])
    def test_a_session_that_is_gone_says_so_from_then_on(self, open_core, wire, text, kind):
        turn = begin(open_core)
        [request] = open_core.requests_to_send()
        open_core.receive(wire.error(request.id, text))
        with pytest.raises(kind):
            turn.next_event()
        with pytest.raises(kind):
            begin(open_core)
        assert open_core.keepalive_at is None
        open_core.begin_close(5.0)
        [end] = open_core.requests_to_send()
        assert wire.flags(end) == (False, True)

    @pytest.mark.parametrize(
        "text", ["INVALID_ARGUMENT: no", "CONTEXT_FULL: no", "UNAVAILABLE: drains", "INTERNAL: no"]
    )
    def test_a_refused_turn_leaves_the_session_open(self, open_core, wire, text):
        begin(open_core)
        [request] = open_core.requests_to_send()
        open_core.receive(wire.error(request.id, text))
        turn = begin(open_core)
        [request] = open_core.requests_to_send()
        open_core.receive(wire.message(request.id, end=wire.status()))
        assert len(events(turn)) == 1

    def test_a_broken_stream_fails_what_waits_and_what_was_not_sent(self, core):
        sent, unsent = begin(core), begin(core)
        core.requests_to_send()
        core.connection_lost(ConnectionLost("broken"))
        for turn in (sent, unsent):
            with pytest.raises(ConnectionLost, match="broken"):
                turn.next_event()
        with pytest.raises(ConnectionLost, match="broken"):
            begin(core)
        assert core.begin_close(5.0) is None
        assert core.requests_to_send() == []

    def test_the_end_of_the_stream_after_close_is_no_loss(self, open_core, wire):
        open_core.begin_close(5.0)
        [end] = open_core.requests_to_send()
        open_core.receive(wire.message(end.id, end=wire.status()))
        open_core.connection_lost(ConnectionLost("over"))
        assert open_core.lifecycle.state is SessionState.CLOSED
        with pytest.raises(SessionClosed):
            begin(open_core)


class TestTime:
    def test_a_turn_times_out_and_the_session_goes_on(self, open_core, clock, wire):
        late = begin(open_core, timeout_s=2.0)
        [first] = open_core.requests_to_send()
        clock.now_s += 2.0
        assert open_core.remaining_s(late) <= 0
        open_core.time_out(late)
        with pytest.raises(TurnTimeout):
            late.next_event()
        turn = begin(open_core)
        assert open_core.requests_to_send() == []  # it would follow on an answer that nobody wants
        open_core.receive(wire.message(first.id, ids=(5,), position=10))
        cut, second = open_core.requests_to_send()
        assert (wire.option(cut, "rewind_to"), wire.option(cut, "on_overlap")) == (10, "interrupt")
        open_core.receive(wire.message(first.id, end=wire.status(finish_reason="interrupted")))
        open_core.receive(wire.message(cut.id, end=wire.status()))
        open_core.receive(wire.message(second.id, end=wire.status(context_len=20)))
        assert len(events(turn)) == 1
        assert open_core.context_len == 20

    def test_a_turn_that_timed_out_before_it_was_sent_never_is(self, core, wire):
        begin(core)
        waiting = begin(core)
        [start] = core.requests_to_send()
        core.time_out(waiting)
        core.receive(wire.message(start.id, end=wire.status()))
        assert core.requests_to_send() == []

    def test_a_keepalive_is_due_well_within_the_idle_time(self, open_core, clock, wire):
        assert open_core.keepalive_at == clock.now_s + 60.0 * KEEPALIVE_SHARE
        clock.now_s += 60.0 * KEEPALIVE_SHARE - 0.1
        open_core.tick()
        assert open_core.requests_to_send() == []
        clock.now_s += 0.1
        open_core.tick()
        [request] = open_core.requests_to_send()
        assert wire.flags(request) == (False, False)
        assert (request.inputs[0].name, list(request.inputs[0].shape)) == ("input_ids", [1, 0])
        assert wire.option(request, "max_tokens") == 0
        assert open_core.keepalive_at is None
        open_core.receive(wire.message(request.id, end=wire.status(finish_reason="append")))
        assert open_core.keepalive_at == clock.now_s + 60.0 * KEEPALIVE_SHARE

    def test_no_keepalive_while_a_turn_is_out_or_before_the_first(self, core, clock, wire):
        assert core.keepalive_at is None
        begin(core)
        [request] = core.requests_to_send()
        core.receive(wire.message(request.id, ids=(5,), position=0))
        clock.now_s += 1000.0
        core.tick()
        assert core.requests_to_send() == []

    def test_no_keepalive_for_a_session_that_is_closing_or_has_no_idle_time(self, open_core, clock, wire):
        begin(open_core)
        [request] = open_core.requests_to_send()
        open_core.receive(wire.message(request.id, end=wire.status(expires_in_s=0)))
        assert open_core.keepalive_at is None
        open_core.begin_close(5.0)
        clock.now_s += 1000.0
        open_core.tick()
        assert len(open_core.requests_to_send()) == 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(0, 3)),
        st.tuples(st.just("answer"), st.integers(0, 3)),
        st.tuples(st.just("refuse"), st.sampled_from(["INVALID_ARGUMENT", "UNAVAILABLE", "EXPIRED"])),
        st.tuples(st.just("leave"), st.integers(0, 5)),
        st.tuples(st.just("time_out"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.floats(0, 100)),
        st.tuples(st.just("close"), st.none()),
        st.tuples(st.just("break"), st.none()),
    ),
    max_size=40,
)


class PlainServer:
    """Answers requests in order, and checks what a server may expect of a client."""

    def __init__(self, wire):
        self.wire = wire
        self.queue = []
        self.is_open = self.is_ended = False
        self.num_started = 0

    def take(self, requests):
        for request in requests:
            assert not self.is_ended, "a request after END"
            is_start, self.is_ended = self.wire.flags(request)
            assert not (is_start and (self.is_open or self.queue)), "START on a session that lives"
            self.queue.append(request)

    def answer(self, num_tokens, refusal=None):
        if not self.queue:
            return []
        request = self.queue.pop(0)
        if refusal is None and (self.is_open or self.wire.flags(request)[0]):
            self.is_open = True
            given = int.from_bytes(request.raw_input_contents[0][:4], "little")
            tokens = [self.wire.message(request.id, ids=(given,), position=n) for n in range(num_tokens)]
            return [*tokens, self.wire.message(request.id, end=self.wire.status(turn=given))]
        if refusal == "EXPIRED":
            self.is_open = False
        return [self.wire.error(request.id, f"{refusal or 'NOT_FOUND'}: no")]


@settings(max_examples=300)
# A turn that waited for one that its reader had left: it was never sent, nor told that the session was gone.
@example([("turn", 0), ("turn", 0), ("turn", 0), ("leave", 1), ("answer", 0), ("refuse", "EXPIRED")])
@given(steps)
def test_whatever_happens_every_turn_ends_with_its_own_events_and_the_server_sees_a_legal_session(wire, script):
    clock = Clock()
    core = SessionCore(Requests("streaming_llm", 5, {}), clock)
    server = PlainServer(wire)
    turns, left = [], set()
    is_broken = is_closing = False
    for what, value in script:
        match what:
            case "turn":
                try:
                    turns.append(begin(core, encode_input([len(turns)])))
                except MicroturnError:
                    assert is_closing or core.lifecycle.state in (SessionState.GONE, SessionState.LOST)
            case "answer" | "refuse" if not is_broken:
                for message in server.answer(value) if what == "answer" else server.answer(0, value):
                    core.receive(message)
            case "leave" | "time_out" if value < len(turns):
                if what == "leave":
                    turns[value].leave()
                elif not turns[value].is_over:
                    core.time_out(turns[value])
                left.add(value)
            case "wait":
                clock.now_s += value
                core.tick()
            case "close":
                core.begin_close(1.0)
                is_closing = True
            case "break":
                core.connection_lost(ConnectionLost("broken"))
                is_broken = True
        requests = core.requests_to_send()
        if is_broken:
            assert requests == []
        server.take(requests)
    while not is_broken and server.queue:
        for message in server.answer(1):
            core.receive(message)
        server.take(core.requests_to_send())
    for number, turn in enumerate(turns):
        assert turn.is_over
        if number not in left:
            try:
                *tokens, end = events(turn)
            except MicroturnError:
                continue
            assert all(event.ids == (number,) for event in tokens)
            assert end.status.turn == number
