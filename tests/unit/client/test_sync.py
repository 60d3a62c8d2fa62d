import gc
import os
import socket
import threading
import time

import grpc
import numpy as np
import psutil
import pytest

from microturn_client import (
    Client,
    ConnectionLost,
    InternalError,
    InvalidArgument,
    NotFound,
    ProtocolError,
    Recovery,
    ResourceExhausted,
    SessionClosed,
    Tokens,
    TurnEnd,
    TurnTimeout,
    Unavailable,
)
from microturn_client.testing import FakeServer


@pytest.fixture
def client(server):
    with Client(server.address, timeout_s=20.0, recovery=None) as client:
        yield client


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_a_session_from_start_to_end(client, server, wire):
    with client.session(idle_timeout_s=60) as session:
        *tokens, end = session.turn("so the first thing I", max_tokens=4)
        assert [event.ids for event in tokens] == [(0,), (1,), (2,), (3,)]
        assert "".join(event.text for event in tokens) == " 0 1 2 3"
        assert [event.position for event in tokens] == [1, 2, 3, 4]
        assert isinstance(end, TurnEnd)
        assert session.append([1, 2, 3]).finish_reason == "append"
        assert session.context_len == 8
        assert session.seed == 1234
    assert server.flags() == [(True, False), (False, False), (False, True)]
    assert {wire.option(request, "sequence_id") for request in server.requests} == {session.id}
    assert wire.option(server.requests[0], "idle_timeout_s") == 60


def test_the_stream_says_whose_it_is_and_ends(client, server):
    with client.session(session_id="abc") as session:
        session.append([1])
    assert [metadata["x-session-id"] for metadata in server.metadata] == ["abc"]
    wait_until(lambda: server.num_ended_streams == 1)


def test_all_inputs(client, server):
    with client.session() as session:
        session.append("text")
        session.append((1, 2))
        session.append(np.zeros((3, 8), np.float32))
        session.turn().wait()
    names = [(request.inputs[0].name, list(request.inputs[0].shape)) for request in server.requests[:-1]]
    assert names == [
        ("text_input", [1, 1]),
        ("input_ids", [1, 2]),
        ("input_embeds", [1, 3, 8]),
        ("input_ids", [1, 0]),
    ]


def test_sessions_have_streams_of_their_own(client, server):
    with client.session() as one, client.session() as two:
        first, second = one.turn([1], max_tokens=2), two.turn([1], max_tokens=3)
        assert (len(list(second)), len(list(first))) == (4, 3)
        assert one.id != two.id
    assert len(server.metadata) == 2


def test_leaving_a_turn_early_leaves_the_next_one_clean(client):
    with client.session() as session:
        for event in session.turn([1], max_tokens=50):
            assert event.ids == (0,)
            break
        assert [event.ids for event in session.turn([2], max_tokens=2) if isinstance(event, Tokens)] == [(0,), (1,)]
        assert session.context_len == 2 + 1 + 2


def test_a_turn_that_was_closed_is_over(client):
    with client.session() as session:
        turn = session.turn([1], max_tokens=3)
        turn.close()
        assert list(turn) == []
        with pytest.raises(ValueError, match="handed out"):
            turn.wait()


def test_closing_a_turn_frees_the_thread_that_waits_for_it(client, server):
    server.script = lambda _request, context: iter(_until_the_end(context))
    turn = client.session().turn([1])
    timer = threading.Timer(0.1, turn.close)
    timer.start()
    assert list(turn) == []
    timer.join()


def test_a_turn_ends_once(client):
    with client.session() as session:
        turn = session.turn([1], max_tokens=1)
        assert turn.wait().finish_reason == "length"
        assert list(turn) == []


def test_turns_can_be_begun_while_others_run(client):
    with client.session() as session:
        turns = [session.turn([number], max_tokens=2) for number in range(5)]
        assert [turn.wait().context_len for turn in turns] == [3, 6, 9, 12, 15]


def test_several_threads_use_one_session(client):
    with client.session() as session:
        session.append([1])
        lens = []

        def talk():
            lens.extend(len(list(session.turn([1], max_tokens=3))) for _ in range(20))

        threads = [threading.Thread(target=talk) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert lens == [4] * 80
        assert session.append([]).context_len == 1 + 80 * 4


def test_what_the_server_refuses_is_raised_by_the_iterator_and_the_session_goes_on(client, server, wire):
    def script(request, _context):
        if wire.option(request, "boom"):
            return iter([wire.error(request.id, "RESOURCE_EXHAUSTED: wait [retry_after_ms=50]")])
        return None

    server.script = script
    with client.session() as session:
        session.append([1])
        turn = session.turn([1], boom=1)
        with pytest.raises(ResourceExhausted) as raised:
            next(turn)
        assert raised.value.retry_after_ms == 50
        assert session.append([1]).context_len == 2


def test_a_refused_start_is_tried_again_with_the_next_turn(client, server, wire):
    server.script = lambda request, _context: (
        iter([wire.error(request.id, "INVALID_ARGUMENT: no")]) if len(server.requests) == 1 else None
    )
    with client.session() as session:
        first, second = session.turn([1]), session.turn([1], max_tokens=1)
        with pytest.raises(InvalidArgument):
            first.wait()
        assert second.wait().context_len == 2
    assert server.flags() == [(True, False), (True, False), (False, True)]


def test_what_has_no_form_on_the_wire_is_refused_before_anything_is_sent(client, server):
    session = client.session()
    with pytest.raises(TypeError):
        session.turn(object())
    with pytest.raises(InvalidArgument):
        session.turn([1], priority=1)
    with pytest.raises(InvalidArgument):
        client.session(session_id=0)
    assert session.close() is None
    assert server.requests == []


def test_a_last_response_without_status_is_no_success(client, server, wire):
    server.script = lambda request, _context: iter([wire.message(request.id, ids=(5,), position=0, is_final=True)])
    turn = client.session().turn([1])
    with pytest.raises(ProtocolError):
        turn.wait()


class TestSilence:
    def test_a_server_that_never_answers_hangs_nobody(self, server):
        server.script = lambda _request, context: iter(_until_the_end(context))
        started_s = time.monotonic()
        with Client(server.address, timeout_s=0.2, recovery=None) as client:
            session = client.session()
            with pytest.raises(TurnTimeout):
                session.append([1])
            with pytest.raises(TurnTimeout):
                session.turn([1], timeout_s=0.1).wait()
            assert session.close(timeout_s=0.2) is None
        assert time.monotonic() - started_s < 5.0
        wait_until(lambda: server.num_ended_streams == 1)

    def test_what_comes_too_late_is_nobodys(self, client, server):
        release = threading.Event()

        def script(request, _context):
            if len(server.requests) != 2:
                return None

            def late():
                release.wait(10.0)
                yield from server.answer(request)

            return late()

        server.script = script
        with client.session() as session:
            session.append([1])
            with pytest.raises(TurnTimeout):
                session.turn([1], max_tokens=3, timeout_s=0.1).wait()
            turn = session.turn([1], max_tokens=1)
            release.set()
            assert len(list(turn)) == 2
            assert session.context_len == 1 + 1 + 2

    def test_a_stream_that_dies_without_a_word_is_replaced(self):
        server = FakeServer(token_s=0.005)
        recovery = Recovery(ask_again_after_s=0.1)
        with server.client(recovery=recovery) as client, client.session(timeout_s=20.0) as session:
            turn = session.turn([1], max_tokens=20)
            first = next(turn)
            server.mute_streams()
            *rest, end = turn
            assert all(isinstance(event, Tokens) for event in rest)
            assert sum(len(event.ids) for event in (first, *rest)) == 20
            assert isinstance(end, TurnEnd)
            server.mute_streams()
            assert session.append([2]).context_len == 1 + 20 + 1

    def test_a_connection_that_dies_without_a_word_is_replaced(self, client, server):
        """What was written to it was sent again for a quarter of an hour, and every new stream took the same way."""
        client.session().append([1])
        port = int(server.address.rpartition(":")[2])
        ends = psutil.Process().net_connections("tcp")
        [descriptor] = [end.fd for end in ends if end.raddr and end.raddr.port == port]
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000

    def test_a_turn_without_limit_waits(self, client):
        assert client.session(timeout_s=float("inf")).append([1]).context_len == 1


class TestBrokenStreams:
    def test_nothing_listens_there(self):
        with Client("127.0.0.1:1", recovery=None) as client, client.session() as session:
            turn = session.turn([1])
            with pytest.raises(ConnectionLost):
                turn.wait()
            with pytest.raises(Unavailable):
                session.turn([1])

    def test_a_server_that_goes_fails_all_turns(self, client, server):
        server.script = lambda _request, context: iter(_until_the_end(context)) if len(server.requests) == 2 else None
        with client.session() as session:
            session.append([1])
            turns = [session.turn([1]) for _ in range(3)]
            wait_until(lambda: len(server.requests) == 2)
            server.stop()
            for turn in turns:
                with pytest.raises(ConnectionLost):
                    turn.wait()
            with pytest.raises(ConnectionLost):
                session.append([1])

    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (grpc.StatusCode.INTERNAL, ConnectionLost),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted),
            (grpc.StatusCode.NOT_FOUND, NotFound),
        ],
    )
    def test_the_streams_own_status_is_mapped(self, client, server, status, kind):
        def script(_request, context):
            context.abort(status, "as the test wants it")

        server.script = script
        turn = client.session().turn([1])
        with pytest.raises(kind, match="as the test wants it"):
            turn.wait()

    def test_events_that_came_before_are_handed_out_first(self, client, server, wire):
        def script(request, context):
            yield wire.message(request.id, ids=(5,), position=0)
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        server.script = script
        turn = client.session().turn([1])
        assert next(turn).ids == (5,)
        with pytest.raises(ConnectionLost):
            next(turn)

    def test_a_server_that_ends_the_stream_is_no_success(self, client, server):
        server.script = lambda _request, _context: server.end_stream()
        turn = client.session().turn([1])
        with pytest.raises(ConnectionLost, match="ended the stream"):
            turn.wait()

    def test_a_broken_stream_leaves_no_thread_behind(self, client, server):
        server.script = lambda _request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        before = set(threading.enumerate())
        session = client.session()
        turn = session.turn([1])
        with pytest.raises(ConnectionLost):
            turn.wait()

        def is_of_a_stream(thread):
            return thread not in before and not thread.name.startswith(("ThreadPoolExecutor", "microturn-timer"))

        wait_until(lambda: not any(map(is_of_a_stream, threading.enumerate())))

    def test_a_mistake_in_the_reader_reaches_the_turns(self, client, monkeypatch):
        """A callback that raised used to kill the reader of other clients, and everybody waited for ever."""
        session = client.session()

        def fail(_message):
            raise RuntimeError("planted")

        monkeypatch.setattr(session._core, "receive", fail)
        turn = session.turn([1])
        with pytest.raises(InternalError, match="planted"):
            turn.wait()


class TestKeepalive:
    def test_an_idle_session_is_kept_alive_by_empty_turns(self, client, server, wire):
        server.expires_in_s = 0.15
        with client.session() as session:
            session.append([1, 2])
            wait_until(lambda: len(server.requests) >= 4)
            assert session.context_len == 2
        for request in server.requests[1:]:
            assert list(request.inputs[0].shape) == [1, 0]
            assert wire.option(request, "max_tokens") == 0
        assert sum(end for _, end in server.flags()) == 1
        assert server.flags()[-1] == (False, True)

    def test_turns_between_keepalives_see_their_own_events(self, client, server):
        server.expires_in_s = 0.006
        with client.session() as session:
            for _ in range(100):
                assert len(list(session.turn([1], max_tokens=2))) == 3
                time.sleep(0.003)
            assert session.context_len == 300
        assert len(server.requests) > 110

    def test_a_running_turn_needs_none(self, client, server):
        server.expires_in_s = 0.03
        release = threading.Event()

        def slow(request):
            release.wait(10.0)
            yield from server.answer(request)

        server.script = lambda request, _context: slow(request) if request.inputs[0].shape[1] == 7 else None
        with client.session() as session:
            session.append([1])
            turn = session.turn([1] * 7)
            wait_until(lambda: any(request.inputs[0].shape[1] == 7 for request in server.requests))
            num_requests = len(server.requests)
            time.sleep(0.15)
            assert len(server.requests) == num_requests
            release.set()
            assert turn.wait().context_len == 8 + 16

    def test_a_session_that_nobody_holds_is_left_to_its_idle_time(self, client, server):
        server.expires_in_s = 0.03
        session = client.session()
        session.append([1])
        wait_until(lambda: len(server.requests) > 2)
        del session
        gc.collect()
        wait_until(lambda: server.num_ended_streams == 1)


class TestOneSessionsFault:
    """It ended the thread that keeps all sessions of the client alive."""

    def test_it_stops_no_other_sessions_timer(self, client, server, monkeypatch):
        server.expires_in_s = 0.15
        with client.session() as faulty, client.session() as other:
            monkeypatch.setattr(faulty._core, "tick", lambda: 1 / 0)
            faulty.append([1])
            other.append([1])
            num_requests = len(server.requests)
            wait_until(lambda: len(server.requests) >= num_requests + 3)
            assert {option(request) for request in server.requests[num_requests:]} == {other.id}
            with pytest.raises(InternalError, match="division by zero"):
                faulty.append([2])

    def test_nor_does_one_in_the_timer_itself(self, client, server, monkeypatch):
        server.expires_in_s = 0.15
        with client.session() as faulty, client.session() as other:
            monkeypatch.setattr(faulty._stream, "tick", lambda: 1 / 0)
            faulty.append([1])
            other.append([1])
            num_requests = len(server.requests)
            wait_until(lambda: len(server.requests) >= num_requests + 3)

    def test_a_close_that_raises_keeps_no_other_session_open_and_no_channel(self, server, monkeypatch):
        client = Client(server.address, timeout_s=20.0)
        sessions = [client.session() for _ in range(3)]
        for session in sessions:
            session.append([1])
            monkeypatch.setattr(session, "_finish_close", _failing(session._finish_close, session is sessions[1]))
        with pytest.raises(ZeroDivisionError):
            client.close()
        assert client._connection.is_closed
        assert sum(end for _, end in server.flags()) == 3
        assert [session._core.lifecycle.state.value for session in sessions] == ["closed"] * 3


def option(request):
    return request.parameters["sequence_id"].int64_param


def _failing(close, fails):
    def close_and_fail(end):
        close(end)
        if fails:
            raise ZeroDivisionError

    return close_and_fail


class TestClosing:
    def test_close_returns_the_last_status(self, client):
        session = client.session()
        session.append([1])
        assert session.close().finish_reason == "closed"
        assert session.close() is None
        with pytest.raises(SessionClosed):
            session.turn([1])

    def test_a_session_without_turns_opens_no_stream(self, client, server):
        with client.session():
            pass
        assert server.metadata == []

    def test_end_waits_for_the_turn_that_was_left(self, client, server):
        with client.session() as session:
            next(session.turn([1], max_tokens=30))
        assert server.flags()[-1] == (False, True)

    def test_closing_the_client_closes_its_sessions(self, server):
        client = Client(server.address, recovery=None)
        sessions = [client.session() for _ in range(3)]
        for session in sessions:
            session.append([1])
        client.close()
        assert sum(end for _, end in server.flags()) == 3
        with pytest.raises(SessionClosed):
            sessions[0].turn([1])
        with pytest.raises(SessionClosed):
            client.session()
        client.close()

    def test_an_error_in_the_block_comes_through(self, client, server):
        def talk():
            with client.session() as session:
                session.append([1])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            talk()
        assert server.flags()[-1] == (False, True)

    def test_no_thread_is_left(self, server):
        # Other tests of this process may have engines, whose threads are named alike.
        before = set(threading.enumerate())
        with Client(server.address, recovery=None) as client:
            with client.session() as session:
                session.append([1])
            client.session().append([1])
        wait_until(lambda: not [t for t in {*threading.enumerate()} - before if t.name.startswith("microturn-")])


def _until_the_end(context):
    """Yields nothing until the stream is over."""
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(10.0)
    yield from ()


def test_a_client_that_is_closed_asks_nothing_more(server):
    """gRPC's own complaint about a closed channel came through."""
    client = Client(server.address)
    client.close()
    with pytest.raises(SessionClosed):
        client.model_info()


def test_who_listens_to_a_session_that_was_closed_hears_its_end() -> None:
    """A thread that was slow to wake was told that the connection is lost, since closing ends the stream too."""
    with FakeServer().client() as client:
        session = client.session()
        session.append([1])
        session.close()
        assert list(session) == []
