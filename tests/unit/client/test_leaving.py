"""Whoever leaves a turn or a session, however that is: its generation ends at once, without a garbage collection."""

import asyncio
import gc
import signal
import threading
import time
from contextlib import aclosing, contextmanager

import pytest

from microturn_client import ContextFull, Tokens, TurnEnd
from microturn_client.testing import FakeServer

TOKEN_S = 0.005
# Of the issue: no generation goes on so long after its program left.
AT_ONCE_S = 0.2
LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(autouse=True)
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def server():
    return FakeServer(token_s=TOKEN_S, max_context=8192)


@pytest.fixture
def kept():
    """What the program still holds, such as a traceback."""
    return []


@pytest.fixture
def ctrl_c_interrupts():
    """Also where the tests were started in the background, as by a shell that has SIGINT ignored there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def assert_it_stands_still(server, session_id):
    """Within the time the session has ended, or grows no more."""
    time.sleep(AT_ONCE_S)
    lengths = []
    for _ in range(2):
        try:
            lengths.append(len(server.context_of(session_id)))
        except KeyError:
            return
        time.sleep(10 * TOKEN_S)
    assert lengths[0] == lengths[1]


class LeavesError(Exception):
    """The program's own."""


class TestThreads:
    @contextmanager
    def session(self, server):
        with server.client() as client, client.session() as session:
            yield session

    def test_break(self, server):
        with self.session(server) as session:
            for _ in session.turn([1], **LONG):
                break
            assert_it_stands_still(server, session.id)
            assert len(server.context_of(session.id)) == 2

    def test_an_exception_whose_traceback_is_kept(self, server, kept):
        """The traceback holds the frame, and so the turn."""
        with self.session(server) as session:

            def talk():
                with session.turn([1], **LONG) as turn:
                    kept.append(turn)
                    next(turn)
                    raise LeavesError

            with pytest.raises(LeavesError) as raised:
                talk()
            kept.append(raised)
            assert_it_stands_still(server, session.id)
            assert len(server.context_of(session.id)) == 2

    def test_a_session_is_left_by_an_exception_while_its_answer_runs(self, server, kept):
        began_s = time.monotonic()

        def talk():
            with self.session(server) as session:
                kept.append(session.turn([1], **LONG))
                next(kept[0])
                kept.append(session)
                raise LeavesError

        with pytest.raises(LeavesError) as raised:
            talk()
        kept.append(raised)
        assert time.monotonic() - began_s < 2.0  # it was the whole time that closing may take
        with pytest.raises(KeyError):
            server.context_of(kept[1].id)
        *_, end = kept[0]
        assert end.status.finish_reason == "interrupted"

    def test_ctrl_c_while_an_event_is_awaited(self, server, kept, ctrl_c_interrupts):
        with self.session(server) as session:
            turn = session.turn([1], **LONG)
            kept.append(turn)
            timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                turn.wait()
            assert_it_stands_still(server, session.id)

    def test_a_turn_that_nobody_holds(self, server):
        with self.session(server) as session:
            session.turn([1], **LONG)
            assert_it_stands_still(server, session.id)

    def test_a_turn_that_has_failed_keeps_no_session(self, server):
        """Its error was raised itself: the traceback held the session, and the session's turn the error."""
        with server.client() as client:
            session = client.session(max_context=10)
            turn = session.turn([1], max_tokens=1000)
            with pytest.raises(ContextFull) as raised:
                turn.wait()
            del turn, raised, session
            assert client._connection.sessions() == []


class TestAsyncio:
    async def stands_still(self, server, session):
        await asyncio.to_thread(assert_it_stands_still, server, session.id)

    async def test_break(self, server):
        async with server.async_client() as client, client.session() as session:
            async for _ in session.turn([1], **LONG):
                break
            await self.stands_still(server, session)
            assert len(server.context_of(session.id)) == 2

    async def test_an_exception_whose_traceback_is_kept(self, server, kept):
        async with server.async_client() as client, client.session() as session:

            async def talk():
                async with aclosing(session.turn([1], **LONG)) as turn:
                    kept.append(turn)
                    await anext(turn)
                    raise LeavesError

            with pytest.raises(LeavesError) as raised:
                await talk()
            kept.append(raised)
            await self.stands_still(server, session)

    async def test_a_cancelled_task_that_is_kept(self, server, kept):
        async with server.async_client() as client, client.session() as session:

            async def talk(turn):
                async for _ in turn:
                    pass

            turn = session.turn([1], **LONG)
            task = asyncio.create_task(talk(turn))
            kept += [turn, task]
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await self.stands_still(server, session)
            assert (await session.append([2])).finish_reason == "append"

    async def test_a_cancelled_task_that_holds_the_session(self, server, kept):
        async with server.async_client() as client:

            async def talk():
                async with client.session() as session:
                    kept.append(session)
                    await session.turn([1], **LONG).text()

            task = asyncio.create_task(talk())
            await asyncio.sleep(0.05)
            cancelled_s = time.monotonic()
            task.cancel()
            await asyncio.wait([task])
            assert time.monotonic() - cancelled_s < 2.0
            with pytest.raises(KeyError):
                server.context_of(kept[0].id)

    async def test_a_stream_that_is_left(self, server, kept):
        async def source():
            yield [1]
            await asyncio.sleep(10.0)

        async with server.async_client() as client, client.session() as session:
            async with aclosing(session.stream(source(), every_ms=10, **LONG)) as stream:
                kept.append(stream)
                async for event in stream:
                    if isinstance(event, Tokens):
                        break
            await self.stands_still(server, session)


class TestACancelledAppend:
    async def cancel(self, session, given):
        task = asyncio.create_task(session.append(given))
        await asyncio.sleep(0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as raised:
            await task
        [note] = raised.value.__notes__
        return note

    async def test_one_that_is_not_on_the_wire_is_taken_back(self, server):
        server.go_down()
        async with server.async_client() as client, client.session() as session:
            opening = session.turn([1], max_tokens=0)
            assert "not appended" in await self.cancel(session, [2])
            server.come_back()
            await opening.wait()
            await session.append([3])
            assert server.context_of(session.id) == [1, 3]

    async def test_one_that_is_stays_and_says_so(self, server):
        """The README said that it was undone."""
        async with server.async_client() as client, client.session() as session:
            running = session.turn([1], max_tokens=60)
            await anext(running)
            assert "stays in the context" in await self.cancel(session, [2])
            await running.wait()
            await session.append([3])
            context = server.context_of(session.id)
            assert (context[0], context[-2:], len(context)) == (1, [2, 3], 63)


class TestTime:
    """Silence and the whole turn are two times, as in httpx."""

    def test_a_healthy_long_answer_outlasts_the_time_of_silence(self, server):
        with server.client(timeout_s=0.3) as client, client.session() as session:
            began_s = time.monotonic()
            assert session.turn([1], max_tokens=100).collect().status.finish_reason == "length"
            assert time.monotonic() - began_s > 0.4

    def test_what_waits_behind_a_long_answer_is_no_silence(self, server):
        with server.client(timeout_s=0.3) as client, client.session() as session:
            turns = [session.turn([1], max_tokens=60), session.turn([2], max_tokens=60), session.turn([3])]
            assert turns[-1].collect().status.context_len == 3 + 60 + 60 + 16


class TestStreaming:
    async def test_it_goes_on_listening_while_it_answers(self, server):
        """A micro-turn waited for the end of the answer; one that interrupts lands on its beat."""

        async def source():
            yield [1]
            await asyncio.sleep(0.1)
            yield [2]

        async with server.async_client() as client, client.session() as session:
            stream = session.stream(source(), every_ms=20, on_overlap="interrupt", max_tokens=100)
            ends = [event.status async for event in stream if isinstance(event, TurnEnd)]
            assert [status.finish_reason for status in ends] == ["interrupted", "length"]
            context = server.context_of(session.id)
            assert context[0] == 1
            assert context[ends[0].context_len] == 2
            assert ends[0].context_len < 60
            assert ends[1].context_len == ends[0].context_len + 1 + 100

    async def test_what_comes_meanwhile_is_on_its_way_before_the_answer_ends(self, server):
        async def source():
            yield [1]
            await asyncio.sleep(0.05)
            yield [2]

        beats, tokens_before = [], 0
        async with server.async_client() as client, client.session() as session:
            async for event in session.stream(source(), every_ms=20, max_tokens=60):
                if isinstance(event, Tokens):
                    tokens_before += len(beats) == 1
                elif not isinstance(event, TurnEnd):
                    beats.append(event)
        assert [beat.num_chunks for beat in beats] == [1, 1]
        assert 0 < tokens_before < 50
