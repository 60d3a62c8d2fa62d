"""What a realtime client sends at once, over a real socket: all of it is done in its order, however much it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import InvalidStatus

from microturn_client.testing import FakeServer
from microturn_gateway import app, jobs
from support.gateway import running_gateway
from support.realtime_socket import connected, received

ROLES = ("user", "assistant")
LONG = {"max_output_tokens": 4000, "microturn": {"ignore_eos": True}}


@pytest.fixture
def server() -> FakeServer:
    return FakeServer(token_s=0.01)


@pytest.fixture
def address(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(app, "AsyncClient", lambda _address: server.async_client())
    with running_gateway("a fake one", max_sessions=1) as address:
        yield address


@asynccontextmanager
async def begun(address: str) -> AsyncIterator[ClientConnection]:
    async with connected(address) as socket, asyncio.timeout(30):
        assert (await received(socket))["type"] == "session.created"
        yield socket


async def send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def tell(socket: ClientConnection, numbers: range) -> None:
    """A talk as programs bring one with them."""
    for number in numbers:
        content = [{"type": "input_text", "text": f"<{number}>"}]
        item = {"type": "message", "id": f"item_{number}", "role": ROLES[number % 2], "content": content}
        await send(socket, "conversation.item.create", item=item)


async def events_until(socket: ClientConnection, last: str) -> list[dict[str, Any]]:
    events = [await received(socket)]
    while events[-1]["type"] != last:
        events.append(await received(socket))
    return events


def added(events: list[dict[str, Any]]) -> list[str]:
    return [event["item"]["id"] for event in events if event["type"] == "conversation.item.added"]


@pytest.mark.parametrize("max_waiting", [None, 4000])
async def test_a_talk_that_comes_at_once_is_told_whole_and_answered(
    address: str, max_waiting: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where not all of it may wait here, and the client's socket has the rest."""
    if max_waiting is not None:
        monkeypatch.setattr(jobs, "_MAX_SIZE", max_waiting)
    async with begun(address) as socket:
        await tell(socket, range(200))
        await send(socket, "response.create", response={"max_output_tokens": 5})
        events = await events_until(socket, "response.done")
    assert "error" not in [event["type"] for event in events]
    *items, _answer = added(events)
    assert items == [f"item_{number}" for number in range(200)]
    assert events[-1]["response"]["status"] in ("completed", "incomplete")


async def test_an_answer_is_cancelled_behind_a_hundred_events_that_wait_for_it(address: str) -> None:
    async with begun(address) as socket:
        await tell(socket, range(1))
        await send(socket, "response.create", response=LONG)
        await events_until(socket, "response.output_text.delta")
        await tell(socket, range(1, 101))
        await send(socket, "response.cancel")
        events = await events_until(socket, "response.done")
        assert events[-1]["response"]["status"] == "cancelled"
        await send(socket, "response.create", response={"max_output_tokens": 5})
        events = await events_until(socket, "response.done")
    assert "error" not in [event["type"] for event in events]
    assert added(events)[:-1] == [f"item_{number}" for number in range(1, 101)]


async def test_who_vanishes_while_held_back_leaves_nothing(
    address: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_MAX_SIZE", 4000)
    async with begun(address) as socket:
        await tell(socket, range(1))
        await send(socket, "response.create", response=LONG)
        await events_until(socket, "response.output_text.delta")
        await tell(socket, range(1, 101))
        socket.transport.abort()
    async with asyncio.timeout(20):  # the answer would take twice as long
        while server.num_sessions or not await has_room(address):
            await asyncio.sleep(0.05)


async def has_room(address: str) -> bool:
    """Whether another may come."""
    try:
        async with begun(address):
            return True
    except InvalidStatus:
        return False
