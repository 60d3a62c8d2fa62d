import asyncio
import gc
import threading
import time

import grpc
import numpy as np
import pytest
import uvloop

from microturn_client import (
    AsyncClient,
    ConnectionLost,
    InternalError,
    InvalidArgument,
    ProtocolError,
    Recovery,
    ResourceExhausted,
    Resumed,
    SessionClosed,
    Tokens,
    TurnEnd,
    TurnTimeout,
    Unavailable,
)
from microturn_client.testing import FakeServer


@pytest.fixture
async def client(server):
    async with AsyncClient(server.address, timeout_s=20.0, recovery=None) as client:
        yield client


async def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)


async def events(turn):
    return [event async for event in turn]


async def test_a_session_from_start_to_end(client, server, wire):
    async with client.session(idle_timeout_s=60) as session:
        *tokens, end = await events(session.turn("so the first thing I", max_tokens=4))
        assert [event.ids for event in tokens] == [(0,), (1,), (2,), (3,)]
        assert "".join(event.text for event in tokens) == " 0 1 2 3"
        assert [event.position for event in tokens] == [1, 2, 3, 4]
        assert isinstance(end, TurnEnd)
        assert (await session.append(np.array([1, 2, 3]))).finish_reason == "append"
        assert session.context_len == 8
        assert session.seed == 1234
    assert server.flags() == [(True, False), (False, False), (False, True)]
    assert {wire.option(request, "sequence_id") for request in server.requests} == {session.id}
    await wait_until(lambda: server.num_ended_streams == 1)


async def test_the_stream_says_whose_it_is(client, server):
    async with client.session(session_id="abc") as session:
        await session.append([1])
    assert [metadata["x-session-id"] for metadata in server.metadata] == ["abc"]


async def test_many_sessions_talk_at_once(client, server):
    async def talk():
        async with client.session() as session:
            for number in range(1, 6):
                assert len(await events(session.turn([1], max_tokens=3))) == 4
                assert session.context_len == number * 4

    await asyncio.gather(*(talk() for _ in range(8)))
    assert len(server.metadata) == 8


async def test_leaving_a_turn_early_leaves_the_next_one_clean(client):
    async with client.session() as session:
        async for event in session.turn([1], max_tokens=50):
            assert event.ids == (0,)
            break
        later = await events(session.turn([2], max_tokens=2))
        assert [event.ids for event in later if isinstance(event, Tokens)] == [(0,), (1,)]
        assert session.context_len == 2 + 1 + 2


async def test_a_cancelled_task_leaves_its_turn(client, server):
    release = threading.Event()

    def slow(request):
        release.wait(10.0)
        yield from server.answer(request)

    server.script = lambda request, _context: slow(request) if len(server.requests) == 2 else None
    async with client.session() as session:
        await session.append([1])
        task = asyncio.create_task(session.turn([1], max_tokens=2).wait())
        await wait_until(lambda: len(server.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        assert len(await events(session.turn([1], max_tokens=1))) == 2
        assert session.context_len == 4


async def test_closing_a_turn_frees_the_task_that_waits_for_it(client, server):
    server.script = lambda _request, context: iter(_until_the_end(context))
    turn = client.session().turn([1])
    task = asyncio.create_task(events(turn))
    await asyncio.sleep(0.05)
    turn.close()
    assert await task == []
    with pytest.raises(ValueError, match="handed out"):
        await turn.wait()


async def test_turns_can_be_begun_while_others_run(client):
    async with client.session() as session:
        turns = [session.turn([number], max_tokens=2) for number in range(5)]
        statuses = await asyncio.gather(*(turn.wait() for turn in turns))
        assert [status.context_len for status in statuses] == [3, 6, 9, 12, 15]


async def test_what_the_server_refuses_is_raised_by_the_iterator_and_the_session_goes_on(client, server, wire):
    def script(request, _context):
        if wire.option(request, "boom"):
            return iter([wire.error(request.id, "RESOURCE_EXHAUSTED: wait [retry_after_ms=50]")])
        return None

    server.script = script
    async with client.session() as session:
        await session.append([1])
        with pytest.raises(ResourceExhausted) as raised:
            await session.turn([1], boom=1).wait()
        assert raised.value.retry_after_ms == 50
        assert (await session.append([1])).context_len == 2


async def test_a_refused_start_is_tried_again_with_the_next_turn(client, server, wire):
    server.script = lambda request, _context: (
        iter([wire.error(request.id, "INVALID_ARGUMENT: no")]) if len(server.requests) == 1 else None
    )
    async with client.session() as session:
        first, second = session.turn([1]), session.turn([1], max_tokens=1)
        with pytest.raises(InvalidArgument):
            await first.wait()
        assert (await second.wait()).context_len == 2
    assert server.flags() == [(True, False), (True, False), (False, True)]


async def test_what_has_no_form_on_the_wire_is_refused_before_anything_is_sent(client, server):
    session = client.session()
    with pytest.raises(TypeError):
        session.turn(object())
    with pytest.raises(InvalidArgument):
        session.turn([1], priority=1)
    assert await session.close() is None
    assert server.metadata == []


async def test_a_last_response_without_status_is_no_success(client, server, wire):
    server.script = lambda request, _context: iter([wire.message(request.id, ids=(5,), position=0, is_final=True)])
    session = client.session()
    with pytest.raises(ProtocolError):
        await session.turn([1]).wait()


class TestSilence:
    async def test_a_server_that_never_answers_hangs_nobody(self, server):
        server.script = lambda _request, context: iter(_until_the_end(context))
        started_s = time.monotonic()
        async with AsyncClient(server.address, timeout_s=0.2, recovery=None) as client:
            session = client.session()
            with pytest.raises(TurnTimeout):
                await session.append([1])
            with pytest.raises(TurnTimeout):
                await session.turn([1], timeout_s=0.1).wait()
            assert await session.close(timeout_s=0.2) is None
        assert time.monotonic() - started_s < 5.0
        await wait_until(lambda: server.num_ended_streams == 1)

    async def test_a_stream_that_dies_without_a_word_is_replaced(self):
        server = FakeServer(token_s=0.005)
        recovery = Recovery(ask_again_after_s=0.1)
        async with server.async_client(recovery=recovery) as client, client.session(timeout_s=20.0) as session:
            turn = session.turn([1], max_tokens=20)
            first = await anext(turn)
            server.mute_streams()
            *rest, end = await events(turn)
            assert all(isinstance(event, Tokens) for event in rest)
            assert sum(len(event.ids) for event in (first, *rest)) == 20
            assert isinstance(end, TurnEnd)
            server.mute_streams()
            assert (await session.append([2])).context_len == 1 + 20 + 1

    async def test_a_turn_without_limit_waits(self, client):
        session = client.session(timeout_s=float("inf"))
        assert (await session.append([1])).context_len == 1


class TestBrokenStreams:
    async def test_nothing_listens_there(self):
        async with AsyncClient("127.0.0.1:1", recovery=None) as client, client.session() as session:
            turn = session.turn([1])
            with pytest.raises(ConnectionLost):
                await turn.wait()
            with pytest.raises(Unavailable):
                session.turn([1])

    async def test_a_server_that_goes_fails_all_turns(self, client, server):
        server.script = lambda _request, context: iter(_until_the_end(context)) if len(server.requests) == 2 else None
        async with client.session() as session:
            await session.append([1])
            turns = [session.turn([1]) for _ in range(3)]
            await wait_until(lambda: len(server.requests) == 2)
            await asyncio.to_thread(server.stop)
            for turn in turns:
                with pytest.raises(ConnectionLost):
                    await turn.wait()
            with pytest.raises(ConnectionLost):
                await session.append([1])

    @pytest.mark.parametrize(
        ("status", "kind"),
        [(grpc.StatusCode.INTERNAL, ConnectionLost), (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted)],
    )
    async def test_the_streams_own_status_is_mapped(self, client, server, status, kind):
        server.script = lambda _request, context: context.abort(status, "as the test wants it")
        session = client.session()
        with pytest.raises(kind, match="as the test wants it"):
            await session.turn([1]).wait()

    async def test_events_that_came_before_are_handed_out_first(self, client, server, wire):
        def script(request, context):
            yield wire.message(request.id, ids=(5,), position=0)
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

        server.script = script
        turn = client.session().turn([1])
        assert (await anext(turn)).ids == (5,)
        with pytest.raises(ConnectionLost):
            await anext(turn)

    async def test_a_server_that_ends_the_stream_is_no_success(self, client, server):
        server.script = lambda _request, _context: server.end_stream()
        session = client.session()
        with pytest.raises(ConnectionLost, match="ended the stream"):
            await session.turn([1]).wait()

    async def test_a_mistake_in_the_reader_reaches_the_turns(self, client, monkeypatch):
        session = client.session()

        def fail(_message):
            raise RuntimeError("planted")

        monkeypatch.setattr(session._core, "receive", fail)
        with pytest.raises(InternalError, match="planted"):
            await session.turn([1]).wait()


class TestKeepalive:
    async def test_an_idle_session_is_kept_alive_by_empty_turns(self, client, server, wire):
        server.expires_in_s = 0.15
        async with client.session() as session:
            await session.append([1, 2])
            await wait_until(lambda: len(server.requests) >= 4)
            assert session.context_len == 2
        for request in server.requests[1:]:
            assert list(request.inputs[0].shape) == [1, 0]
            assert wire.option(request, "max_tokens") == 0
        assert sum(end for _, end in server.flags()) == 1
        assert server.flags()[-1] == (False, True)

    async def test_turns_between_keepalives_see_their_own_events(self, client, server):
        server.expires_in_s = 0.006
        async with client.session() as session:
            for _ in range(100):
                assert len(await events(session.turn([1], max_tokens=2))) == 3
                await asyncio.sleep(0.003)
            assert session.context_len == 300
        assert len(server.requests) > 110

    async def test_a_session_that_nobody_holds_is_left_to_its_idle_time(self, client, server):
        server.expires_in_s = 0.03
        session = client.session()
        await session.append([1])
        await wait_until(lambda: len(server.requests) > 2)
        del session
        gc.collect()
        await wait_until(lambda: server.num_ended_streams == 1)


class TestOneSessionsFault:
    async def test_it_stops_no_other_sessions_timer_and_is_told(self, client, server, monkeypatch):
        server.expires_in_s = 0.15
        async with client.session() as faulty, client.session() as other:
            monkeypatch.setattr(faulty._core, "tick", lambda: 1 / 0)
            await faulty.append([1])
            await other.append([1])
            num_requests = len(server.requests)
            await wait_until(lambda: len(server.requests) >= num_requests + 3)
            with pytest.raises(InternalError, match="division by zero"):
                await faulty.append([2])

    async def test_a_close_that_raises_keeps_no_other_session_open_and_no_channel(self, server, wire, monkeypatch):
        client = AsyncClient(server.address, timeout_s=20.0)
        sessions = [client.session() for _ in range(3)]
        for session in sessions:
            await session.append([1])

        async def fail(_end):
            raise ZeroDivisionError

        monkeypatch.setattr(sessions[1], "_finish_close", fail)
        with pytest.raises(ZeroDivisionError):
            await client.close()
        # Nobody has waited until the faulty one's END had left.
        ended = {wire.option(request, "sequence_id") for request in server.requests if wire.flags(request)[1]}
        assert {sessions[0].id, sessions[2].id} <= ended
        assert [sessions[number]._core.lifecycle.state.value for number in (0, 2)] == ["closed"] * 2
        assert client._connection._channel.get_state().name == "SHUTDOWN"


class TestClosing:
    async def test_close_returns_the_last_status(self, client):
        session = client.session()
        await session.append([1])
        assert (await session.close()).finish_reason == "closed"
        assert await session.close() is None
        with pytest.raises(SessionClosed):
            session.turn([1])

    async def test_closing_the_client_closes_its_sessions(self, server):
        client = AsyncClient(server.address, recovery=None)
        sessions = [client.session() for _ in range(3)]
        for session in sessions:
            await session.append([1])
        await client.close()
        assert sum(end for _, end in server.flags()) == 3
        with pytest.raises(SessionClosed):
            sessions[0].turn([1])
        with pytest.raises(SessionClosed):
            client.session()
        await client.close()

    async def test_a_cancelled_block_still_says_end(self, client, server):
        async def talk():
            async with client.session() as session:
                await session.append([1])
                await asyncio.sleep(10.0)

        task = asyncio.create_task(talk())
        await wait_until(lambda: len(server.requests) == 1)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.flags()[-1] == (False, True)

    async def test_no_task_is_left(self, server):
        async with AsyncClient(server.address, recovery=None) as client:
            async with client.session() as session:
                await session.append([1])
            forgotten = client.session()
            await forgotten.append([1])
        await wait_until(lambda: len(asyncio.all_tasks()) == 1)


def _until_the_end(context):
    """Yields nothing until the stream is over."""
    ended = threading.Event()
    if context.add_callback(ended.set):
        ended.wait(10.0)
    yield from ()


async def test_a_client_that_is_closed_asks_nothing_more(server):
    """It made another connection for that, which nobody closed."""
    client = AsyncClient(server.address)
    await client.close()
    with pytest.raises(SessionClosed):
        await client.model_info()
    assert client._connection._channel is None


def test_a_session_goes_on_in_another_event_loop():
    """Its timer belonged to the loop that had ended, so nothing tried again there."""
    server = FakeServer()
    client = server.async_client()
    session = client.session()

    async def talk():
        return (await session.append([1], timeout_s=30)).context_len

    assert [asyncio.run(talk()), asyncio.run(talk())] == [1, 2]


async def test_a_sequence_that_triton_has_ended_is_gone_on_with_and_closed():
    """As at a stranger's END: the session lives, and its owner's turns and END are refused in Triton's words."""
    server = FakeServer()
    async with server.async_client(timeout_s=20.0) as client:
        session, other = client.session(), client.session()
        expected = [event for given in ([1, 2], [3]) for event in await events(other.turn(given, max_tokens=3))]
        told = await events(session.turn([1, 2], max_tokens=3))
        server.end_sequences()
        told += await events(session.turn([3], max_tokens=3))
        assert [event.exact for event in told if isinstance(event, Resumed)] == [True]
        assert tokens_of(told) == tokens_of(expected)
        server.end_sequences()
        status = await session.close()
        assert (status.finish_reason, status.context_len) == ("closed", 9)
        with pytest.raises(KeyError):
            server.context_of(session.id)


def tokens_of(told):
    return [token_id for event in told if isinstance(event, Tokens) for token_id in event.ids]


def test_uvloops_event_loop_does_for_times_that_have_come() -> None:
    """There its `call_at` returns a handle that does not tell its time: a realtime session of the gateway broke."""

    async def wait() -> None:
        async with FakeServer().async_client() as client, client.session() as session:
            await session.append([1])
            for delay_s in (0.0, 0.0, 10.0, 0.0):
                session._stream._arm_timer(delay_s)
            await asyncio.sleep(0.01)
            assert (await session.append([2])).context_len == 2

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(wait())
