"""Turns of streams on an engine in a thread, over a model that is a hash."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from microturn.errors import InvalidArgument, MicroturnError, Unavailable
from microturn.hosts.kserve.engine_front import AnswerQueue, EngineFront, EngineResponses
from microturn.sessions.turn import Status, Turn, TurnOutput
from microturn.settings import TENANT_HEADER
from support.raw import Answer, ids, turn_request
from support.threads import ThreadedDriver, starting_engines

ENDLESS = {"max_tokens": 400, "ignore_eos": True}
STATUS = Status("length", None, 0, 3, 3, {}, {}, 60.0, 1)


@pytest.fixture
def start_engine() -> Iterator[Callable[..., ThreadedDriver]]:
    with starting_engines() as start:
        yield start


class Streams:
    """A front, and what it reports."""

    def __init__(self, driver: ThreadedDriver) -> None:
        self.driver = driver
        self.reported: list[Status | MicroturnError] = []
        self.front = EngineFront(driver.engine, b"config", self._answered, "here")

    def _answered(self, turn: Turn, end: Status | MicroturnError, begun_s: float) -> None:
        self.reported.append(end)

    async def begin(self, session_id: str = "session", tenant: str | None = None, **given: Any) -> EngineResponses:
        message = turn_request(session_id, **({"input_ids": ids(5)} | given))
        turns = await self.front.open(None, tenant)
        return await turns.begin(message.SerializeToString(), message)

    async def ask(self, *args: Any, **given: Any) -> Answer:
        return await all_of(await self.begin(*args, **given))

    def running(self) -> int:
        """How many sessions have turns that are not done."""
        return self.driver.engine.call(lambda _: len(self.driver.engine._lifecycle.running))


@pytest.fixture
def streams(start_engine: Callable[..., ThreadedDriver]) -> Streams:
    return Streams(start_engine())


async def all_of(responses: EngineResponses) -> Answer:
    answer = Answer()
    async with asyncio.timeout(10):
        async for response in responses:
            answer.take(service_pb2.ModelStreamInferResponse.FromString(response))
    return answer


async def test_a_turn_is_answered_to_its_end_and_reported_once(streams: Streams) -> None:
    answer = await streams.ask(start=True, options={"max_tokens": 3, "ignore_eos": True})
    assert len(answer.token_ids) == 3
    assert answer.status is not None
    assert answer.status["finish_reason"] == "length"
    assert [getattr(end, "finish_reason", None) for end in streams.reported] == ["length"]


async def test_a_wrong_option_is_refused_behind_the_turns_before_it(streams: Streams) -> None:
    assert (await streams.ask(start=True, options={"nonsense": 1})).code == "INVALID_ARGUMENT"
    assert isinstance(streams.reported[0], InvalidArgument)


async def test_a_request_for_another_model_is_no_turn(streams: Streams) -> None:
    turns = await streams.front.open(None, None)
    message = turn_request("session", input_ids=ids(5))
    message.model_name = "another"
    with pytest.raises(InvalidArgument, match="unknown model"):
        await turns.begin(message.SerializeToString(), message)


async def test_a_turn_whose_client_has_gone_is_undone(streams: Streams) -> None:
    await streams.ask(start=True, options={"max_tokens": 0})
    responses = await streams.begin(options=ENDLESS)
    await anext(responses)
    waiting = await streams.begin(options={"max_tokens": 0})
    for one in (waiting, responses):
        await one.aclose()
    assert [response async for response in responses] == []
    assert streams.running() == 0
    status = (await streams.ask(input_ids=ids())).status
    assert status is not None
    assert status["context_len"] == 1


async def test_a_turn_that_is_left_says_how_it_ended(streams: Streams) -> None:
    """A worker hands on what its turns answer behind a client's leaving: reports are of all turns."""
    responses = await streams.begin(start=True, options=ENDLESS)
    await anext(responses)
    responses.leave()
    answer = await all_of(responses)
    assert answer.status is not None
    assert answer.status["finish_reason"] == "cancelled"
    assert len(streams.reported) == 1


async def test_an_engine_that_has_stopped_answers(streams: Streams) -> None:
    streams.driver.engine.stop()
    assert (await streams.ask(start=True)).code == "UNAVAILABLE"


async def test_a_tenant_plays_no_part_without_the_setting(start_engine: Callable[..., ThreadedDriver]) -> None:
    """Behind a proxy that names tenants each turn was refused."""
    assert (await Streams(start_engine()).ask(tenant="acme", start=True)).error is None


async def test_a_tenant_has_so_many_sessions(start_engine: Callable[..., ThreadedDriver]) -> None:
    streams = Streams(start_engine(max_sessions_per_tenant=1))
    keep = {"start": True, "options": {"max_tokens": 0}}
    assert (await streams.ask("one", "acme", **keep)).error is None
    assert (await streams.ask("two", "acme", **keep)).code == "RESOURCE_EXHAUSTED"
    assert (await streams.ask("two", "globex", **keep)).error is None
    assert (await streams.ask("one", "globex")).code == "PERMISSION_DENIED"
    disguised = await streams.ask("three", "globex", start=True, options={TENANT_HEADER: "acme"})
    assert disguised.code == "INVALID_ARGUMENT"


async def test_what_is_ready_together_is_one_answer() -> None:
    queue = AnswerQueue(asyncio.get_running_loop())
    await asyncio.to_thread(lambda: [queue.put(TurnOutput(token_ids=(n,), position=n)) for n in (1, 2)])
    answer = await queue.take()
    assert isinstance(answer, TurnOutput)
    assert (answer.token_ids, answer.position, answer.status) == ((1, 2), 1, None)


async def test_an_error_is_all_of_an_answer() -> None:
    queue = AnswerQueue(asyncio.get_running_loop())
    queue.put(TurnOutput(token_ids=(1,)))
    queue.fail(Unavailable("gone"))
    assert isinstance(await queue.take(), Unavailable)


async def test_nothing_is_lost_where_taking_is_given_up() -> None:
    """A worker takes for a second at a time."""
    queue = AnswerQueue(asyncio.get_running_loop())
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await queue.take()
    queue.put(TurnOutput(status=STATUS))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await queue.take()
    answer = await asyncio.wait_for(queue.take(), 10)
    assert isinstance(answer, TurnOutput)
    assert answer.status is STATUS
