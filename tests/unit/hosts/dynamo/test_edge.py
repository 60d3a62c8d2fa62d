"""An edge's turns on workers, beside a stand-in for Dynamo's client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from microturn.errors import InternalError, InvalidArgument
from microturn.hosts.dynamo.edge import EdgeFront
from microturn.hosts.dynamo.workers import Worker, Workers
from microturn.hosts.kserve.service import StreamBrokenError
from support.dynamo_client import Client, Context

LOAD = {"is_leaving": False, "num_sessions": 0, "max_sessions": 4, "late_share": 0.0, "free_bytes": 100}


class Found:
    """`Workers` that a test has found."""

    def __init__(self, *workers: Worker) -> None:
        self.turns = Client()
        self.config: dict[int, Any] = {}
        self._workers = workers

    def all(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.lost.is_set()]

    def named(self, name: str | None) -> Worker | None:
        return next((worker for worker in self.all() if worker.name == name), None)

    def emptiest(self) -> Worker | None:
        return min((worker for worker in self.all() if worker.takes_sessions), key=lambda one: one.rank, default=None)

    async def ask(self, instance_id: int, op: str) -> Any:
        if isinstance(self.config[instance_id], Exception):
            raise self.config[instance_id]
        return self.config[instance_id]


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[Context]:
    """Those that were made."""
    made: list[Context] = []

    def make() -> Context:
        made.append(Context())
        return made[-1]

    monkeypatch.setitem(sys.modules, "dynamo.runtime", SimpleNamespace(Context=make))
    return made


@pytest.fixture
async def workers() -> list[Worker]:
    return [Worker(number, f"worker-{number}", LOAD) for number in (1, 2)]


@pytest.fixture
async def found(workers: list[Worker]) -> Found:
    return Found(*workers)


@pytest.fixture
async def front(found: Found) -> EdgeFront:
    return EdgeFront(cast(Workers, found))


def answering(found: Found, *answers: bytes | Exception) -> None:
    """Has all workers answer a turn so, and then wait for ever unless the last is an exception or `b"end"`."""

    async def handler(_request: Any, _context: Any) -> AsyncIterator[Any]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            yield {"response": answer}
        if not answers or answers[-1] != b"end":
            await asyncio.Event().wait()

    found.turns.handlers = {1: handler, 2: handler}


async def test_new_streams_spread_before_workers_say_how_many_came(front: EdgeFront) -> None:
    assert sorted([(await front.open(None, None)).route for _ in range(4)]) == ["worker-1"] * 2 + ["worker-2"] * 2


async def test_a_route_is_followed_also_to_a_worker_that_leaves(front: EdgeFront, workers: list[Worker]) -> None:
    workers[1].said = LOAD | {"is_leaving": True, "num_sessions": 4}
    assert (await front.open("worker-2", None)).route == "worker-2"
    assert workers[1].num_placed == 0
    assert (await front.open("worker-3", None)).route == "worker-1"


async def test_where_no_worker_is_a_stream_is_broken(front: EdgeFront, workers: list[Worker]) -> None:
    workers[0].lose("gone")
    assert front.is_ready
    workers[1].said = LOAD | {"is_leaving": True}
    assert not front.is_ready
    with pytest.raises(StreamBrokenError):
        await front.open("worker-1", None)


async def test_a_turn_goes_to_its_worker_and_its_answers_come_back(front: EdgeFront, found: Found) -> None:
    answering(found, b"", b"first", b"end")
    turns = await front.open("worker-2", "acme")
    responses = await turns.begin(b"request", None)
    assert found.turns.asked == [({"request": b"request", "tenant": "acme"}, 2)]
    assert [response async for response in responses] == [b"first", b"end"]


async def test_a_turn_has_its_place_when_its_worker_says_so(front: EdgeFront, found: Found) -> None:
    """Otherwise the next one of the session may overtake it."""
    answering(found)
    turns = await front.open(None, None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(turns.begin(b"", None), 0.05)


async def test_empty_responses_are_for_the_edge_alone(front: EdgeFront, found: Found) -> None:
    answering(found, b"", b"", b"first", b"", b"", b"end")
    responses = await (await front.open(None, None)).begin(b"", None)
    assert [response async for response in responses] == [b"first", b"end"]


async def test_a_turn_is_stopped_when_its_client_goes(front: EdgeFront, found: Found, contexts: list[Context]) -> None:
    answering(found, b"", b"first")
    responses = await (await front.open(None, None)).begin(b"", None)
    await anext(responses)
    await responses.aclose()
    assert [context.is_stopped for context in contexts] == [True]


async def test_a_turn_is_stopped_when_its_client_goes_before_it_has_its_place(
    front: EdgeFront, found: Found, contexts: list[Context]
) -> None:
    answering(found)
    beginning = asyncio.create_task((await front.open(None, None)).begin(b"", None))
    await asyncio.sleep(0.01)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    assert [context.is_stopped for context in contexts] == [True]


async def test_a_turn_that_has_ended_is_not_stopped(front: EdgeFront, found: Found, contexts: list[Context]) -> None:
    answering(found, b"", b"end")
    responses = await (await front.open(None, None)).begin(b"", None)
    assert [response async for response in responses] == [b"end"]
    await responses.aclose()
    assert [context.is_stopped for context in contexts] == [False]


@pytest.mark.parametrize("answers", [(), (b"",)], ids=["at once", "later"])
async def test_a_worker_that_dies_in_a_turn_is_lost(
    front: EdgeFront, found: Found, workers: list[Worker], answers: tuple[bytes, ...]
) -> None:
    answering(found, *answers, Exception("Unavailable: Worker disconnected"))
    turns = await front.open("worker-1", None)
    watching = asyncio.create_task(turns.watch())
    with pytest.raises(StreamBrokenError, match="worker-1"):
        await anext(await turns.begin(b"", None))
    assert [worker.lost.is_set() for worker in workers] == [True, False]
    with pytest.raises(StreamBrokenError):
        await asyncio.wait_for(watching, 1)


async def test_a_worker_that_is_not_found_is_lost(front: EdgeFront, workers: list[Worker]) -> None:
    turns = await front.open("worker-1", None)
    with pytest.raises(StreamBrokenError):
        await turns.begin(b"", None)
    assert workers[0].lost.is_set()


async def test_a_worker_that_ends_a_turn_without_a_word_is_lost(
    front: EdgeFront, found: Found, workers: list[Worker]
) -> None:
    """The turn had no answer, and its client waited for one as long as its own time limit."""

    async def handler(_request: Any, _context: Any) -> AsyncIterator[Any]:
        for nothing in ():
            yield nothing

    found.turns.handlers = {1: handler}
    with pytest.raises(StreamBrokenError):
        await (await front.open("worker-1", None)).begin(b"", None)
    assert workers[0].lost.is_set()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("Internal: KeyError: 'x'"), InternalError),
        (ValueError("InvalidRequest: too large"), InvalidArgument),
    ],
    ids=["internal", "too large"],
)
async def test_a_worker_that_fails_in_a_turn_is_not_lost(
    front: EdgeFront, found: Found, workers: list[Worker], error: Exception, expected: type[Exception]
) -> None:
    """What it raised in one turn ended the streams of all its sessions on this edge."""
    answering(found, b"", error)
    responses = await (await front.open("worker-1", None)).begin(b"", None)
    with pytest.raises(expected):
        await anext(responses)
    assert not workers[0].lost.is_set()


async def test_the_config_is_that_of_a_worker_that_tells_it(front: EdgeFront, found: Found) -> None:
    found.config = {1: Exception("Unavailable: gone"), 2: b"config"}
    assert await front.model_config() == b"config"
    found.config[2] = Exception("Unavailable: gone")
    with pytest.raises(StreamBrokenError):
        await front.model_config()
