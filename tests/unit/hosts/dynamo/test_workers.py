"""The workers that an edge finds, beside a stand-in for Dynamo's client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from microturn.errors import InvalidArgument, Unavailable
from microturn.hosts.dynamo import workers as workers_module
from microturn.hosts.dynamo.workers import Workers
from support.dynamo_client import Runtime

LOST_AFTER_S = 0.1
LOAD = {"model": "one", "is_leaving": False, "num_sessions": 0, "max_sessions": 4, "late_share": 0.0, "free_bytes": 100}


class Said:
    """What a worker says of itself.

    Attributes:
        load: its answer, or what is raised; None gives none.
    """

    def __init__(self, name: str, port: int = 1000, **load: Any) -> None:
        self.load: Any = {"name": name, "peer": f"127.0.0.1:{port}"} | LOAD | load

    async def __call__(self, request: Any, context: Any) -> AsyncIterator[Any]:
        assert request == {"op": "load"}
        while self.load is None:
            await asyncio.sleep(0.01)
        if isinstance(self.load, Exception):
            raise self.load
        yield self.load


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_ASK_EVERY_S", 0.01)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
async def workers(runtime: Runtime) -> AsyncIterator[Workers]:
    workers = Workers(runtime, "namespace", LOST_AFTER_S)
    await workers.start()
    yield workers
    workers.close()


@pytest.fixture
def there(runtime: Runtime) -> dict[int, Any]:
    """The workers that there are."""
    return runtime.clients["control"].handlers


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def names(workers: Workers) -> list[str]:
    return [worker.name for worker in workers.all()]


async def test_workers_come_and_leave(workers: Workers, there: dict[int, Any]) -> None:
    there[1], there[2] = Said("a", 1001), Said("b", 1002)
    await until(lambda: names(workers) == ["a", "b"])
    assert list(workers.peer_addresses()) == [("127.0.0.1", 1001), ("127.0.0.1", 1002)]
    left = workers.named("a")
    del there[1]
    await until(lambda: names(workers) == ["b"])
    assert left is not None
    assert left.lost.is_set()
    assert workers.named("a") is None
    assert workers.named(None) is None


async def test_a_worker_without_an_answer_is_lost_until_it_gives_one(workers: Workers, there: dict[int, Any]) -> None:
    there[1] = said = Said("a")
    await workers.wait_for("a")
    before, load = workers.named("a"), said.load
    said.load = None
    await until(lambda: names(workers) == [])
    assert before is not None
    assert before.lost.is_set()
    assert workers.emptiest() is None
    said.load = load
    await workers.wait_for("a")
    assert workers.named("a") is not before, "its streams have ended"


async def test_a_worker_that_is_not_reached_is_lost(workers: Workers, there: dict[int, Any]) -> None:
    there[1] = said = Said("a")
    await workers.wait_for("a")
    said.load = Exception("Unavailable: TCP connection failed")
    await until(lambda: names(workers) == [])


@pytest.mark.parametrize(
    "load",
    [{"name": "a"}, {"name": "a", "peer": "nowhere", **LOAD}, b"config", {}],
    ids=["another version", "no address", "something else", "empty"],
)
async def test_an_answer_that_is_not_understood_loses_its_worker_alone(
    workers: Workers, there: dict[int, Any], load: Any
) -> None:
    """It ended the task that asks, in silence, or had the choice of a worker raise in each new stream."""
    there[1], there[2] = said, _ = Said("a", 1001), Said("b", 1002)
    await until(lambda: names(workers) == ["a", "b"])
    understood, said.load = said.load, load
    await until(lambda: names(workers) == ["b"])
    assert workers.emptiest() is workers.named("b")
    assert list(workers.peer_addresses()) == [("127.0.0.1", 1002)]
    said.load = understood
    await workers.wait_for("a")


async def test_of_two_of_one_name_the_latest_is_meant(workers: Workers, there: dict[int, Any]) -> None:
    there[1] = Said("a")
    await workers.wait_for("a")
    there[2] = Said("a")
    await until(lambda: len(workers.all()) == 2)
    worker = workers.named("a")
    assert worker is not None
    assert worker.instance_id == 2


@pytest.mark.parametrize(
    "worse",
    [
        {"num_sessions": 4, "late_share": 0.0},
        {"late_share": 0.5},
        {"num_sessions": 1},
        {"free_bytes": 50},
        {"is_leaving": True},
    ],
    ids=["full", "late", "fuller", "less room", "leaving"],
)
async def test_a_session_goes_where_it_is_best(workers: Workers, there: dict[int, Any], worse: dict[str, Any]) -> None:
    there[1], there[2] = Said("worse", **worse), Said("better")
    await until(lambda: len(workers.all()) == 2)
    best = workers.emptiest()
    assert best is not None
    assert best.name == "better"


async def test_full_workers_still_take_what_they_refuse_themselves(workers: Workers, there: dict[int, Any]) -> None:
    """So that a client is told RESOURCE_EXHAUSTED, and when to try again."""
    there[1] = Said("a", num_sessions=4)
    await workers.wait_for("a")
    assert workers.emptiest() is workers.named("a")


async def test_sessions_on_their_way_count_until_the_worker_does(workers: Workers, there: dict[int, Any]) -> None:
    there[1] = Said("a")
    await workers.wait_for("a")
    worker = workers.named("a")
    assert worker is not None
    worker.num_placed = 4
    assert worker.rank[0], "full"
    await until(lambda: not worker.rank[0])


async def test_a_namespace_that_dynamo_does_not_take_is_an_invalid_argument(runtime: Runtime) -> None:
    """It was a traceback."""
    with pytest.raises(InvalidArgument, match=r"a\.b"):
        await Workers(runtime, "a.b", LOST_AFTER_S).start()


async def test_the_end_of_dynamos_runtime_ends_the_watch(runtime: Runtime) -> None:
    """An edge whose lease in etcd had ended stayed for ever, and found no worker any more."""
    workers = Workers(runtime, "namespace", LOST_AFTER_S)
    watching = await workers.start()
    await asyncio.sleep(0.05)
    assert not watching.done()
    runtime.clients["nobody"].has_ended.set()
    with pytest.raises(Unavailable, match="lost its discovery"):
        await asyncio.wait_for(watching, 5)
    workers.close()


async def test_a_worker_of_another_model_is_not_used(
    workers: Workers, there: dict[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each new session went to the one or the other model, as it came."""
    there[1] = Said("a")
    await workers.wait_for("a")
    there[2] = Said("b", model="another")
    await until(lambda: "b is not used" in caplog.text)
    await asyncio.sleep(0.05)
    assert names(workers) == ["a"]
    assert caplog.text.count("another model") == 1
    del there[1]
    await workers.wait_for("b")


async def test_a_worker_finds_others_of_its_model_alone(
    workers: Workers, there: dict[int, Any], caplog: pytest.LogCaptureFixture
) -> None:
    workers.keep_to("another")
    there[1], there[2] = Said("a"), Said("b", model="another")
    await until(lambda: "a is not used" in caplog.text)
    await workers.wait_for("b")
    assert names(workers) == ["b"]


async def test_a_worker_does_not_join_those_of_another_model(workers: Workers, there: dict[int, Any]) -> None:
    there[1] = Said("a")
    await workers.wait_for("a")
    with pytest.raises(InvalidArgument, match="worker a has the fingerprint one, this one another"):
        workers.keep_to("another")


async def test_a_worker_without_an_answer_is_asked_less_and_less_often(
    runtime: Runtime, workers: Workers, there: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Discovery names it until its lease ends, with etcd for five minutes."""
    monkeypatch.setattr(workers_module, "_ASK_LOST_EVERY_S", 0.2)
    there[1] = said = Said("a")
    await workers.wait_for("a")
    load, said.load = said.load, Exception("Unavailable: TCP connection failed")
    await asyncio.sleep(0.4)
    num_before = len(runtime.clients["control"].asked)
    await asyncio.sleep(0.5)
    assert len(runtime.clients["control"].asked) <= num_before + 4
    said.load = load
    await workers.wait_for("a")
