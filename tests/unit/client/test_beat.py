import asyncio
import gc

import numpy as np
import pytest

from microturn_client import Beat, Tokens, TurnEnd
from microturn_client._beat import MAX_WAITING, Coalescer
from microturn_client.testing import FakeServer


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["a", "b"], "ab"),
        ([b"a", b"b"], b"ab"),
        ([[1], (2, 3), np.array([4])], [1, 2, 3, 4]),
        ([np.ones((1, 2)), np.zeros((2, 2))], [[1, 1], [0, 0], [0, 0]]),
    ],
)
def test_chunks_of_a_kind_are_one(chunks, expected):
    waiting = Coalescer()
    for chunk in chunks:
        waiting.put(chunk)
    given, num_chunks = waiting.take()
    assert num_chunks == len(chunks)
    assert not len(waiting)
    assert (given == expected) if isinstance(given, str | bytes) else np.asarray(given).tolist() == expected


def test_chunks_of_other_kinds_wait():
    waiting = Coalescer()
    for chunk in ["a", "b", [1], "c"]:
        waiting.put(chunk)
    assert [waiting.take() for _ in range(3)] == [("ab", 2), ([1], 1), ("c", 1)]


async def test_what_comes_while_a_turn_runs_is_the_next_one():
    async def source():
        yield [1]
        await asyncio.sleep(0.01)
        for number in range(2, 6):
            yield [number]

    async with FakeServer(token_s=0.01).async_client() as client, client.session() as session:
        events = [event async for event in session.stream(source(), every_ms=20, max_tokens=4)]
    beats = [event for event in events if isinstance(event, Beat)]
    assert [beat.num_chunks for beat in beats] == [1, 4]
    assert beats[1].late_ms >= 0
    assert sum(isinstance(event, TurnEnd) for event in events) == 2
    assert sum(len(event.ids) for event in events if isinstance(event, Tokens)) == 8


async def test_who_leaves_hears_nothing_of_a_source_that_failed_meanwhile():
    """The task that pulls the source was thrown away with its exception, of which asyncio then complained."""

    async def source():
        yield [1]
        raise ValueError("no more")

    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    async with FakeServer(token_s=0.001).async_client() as client, client.session() as session:
        events = session.stream(source(), every_ms=20, max_tokens=50)
        async for event in events:
            if isinstance(event, Tokens):
                break
        await events.aclose()
        del events
        gc.collect()
        await asyncio.sleep(0)
    assert complaints == []


async def test_a_source_that_is_too_fast_is_held_up():
    pulled = 0

    async def source():
        nonlocal pulled
        for _ in range(1000):
            pulled += 1
            yield "x"

    async with FakeServer(token_s=0.005).async_client() as client, client.session() as session:
        stream = session.stream(source(), every_ms=1, max_tokens=8)
        seen = 0
        async for event in stream:
            if isinstance(event, Beat):
                seen += event.num_chunks
                assert pulled <= seen + 1 + MAX_WAITING
                if event.is_held_up:
                    break
        await stream.aclose()
    assert pulled < 1000


async def test_what_the_source_raises_comes_behind_what_it_gave():
    async def source():
        yield "a"
        raise ZeroDivisionError

    async with FakeServer().async_client() as client, client.session() as session:
        ended = []

        async def listen():
            async for event in session.stream(source(), every_ms=1):
                if isinstance(event, TurnEnd):
                    ended.append(event)  # noqa: PERF401  what came before the error counts

        with pytest.raises(ZeroDivisionError):
            await listen()
        assert len(ended) == 1


def test_with_threads_it_is_the_same():
    def source():
        yield from ["a", "b"]
        raise ZeroDivisionError

    with FakeServer().client() as client, client.session() as session:
        num_chunks = []

        def listen():
            for event in session.stream(source(), every_ms=1, max_tokens=2):
                if isinstance(event, Beat):
                    num_chunks.append(event.num_chunks)  # noqa: PERF401  as above

        with pytest.raises(ZeroDivisionError):
            listen()
        assert sum(num_chunks) == 2
