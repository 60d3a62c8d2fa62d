"""Sessions that survive a loss, as the gateway sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from microturn_client import ConnectionLost, Resumed, Tokens
from microturn_client.testing import FakeServer
from microturn_gateway.sessions import events_of

LIVES = Resumed(same_tokens=True, same_numerics=True, reason="the session lives")
CHANGED = Resumed(same_tokens=False, same_numerics=False, reason="the session has changed meanwhile")
HELLO, THERE = Tokens("Hello", (7,), 3), Tokens(" there", (8,), 4)


async def _heard(turn: Any) -> list[Any]:
    return [event async for event in events_of(turn)]


async def _said(*events: Any) -> AsyncIterator[Any]:
    for event in events:
        yield event


def test_a_session_that_is_the_same_goes_on_without_a_word() -> None:
    assert asyncio.run(_heard(_said(LIVES, HELLO, THERE))) == [HELLO, THERE]


def test_one_that_is_not_the_same_is_lost() -> None:
    with pytest.raises(ConnectionLost, match="has changed meanwhile"):
        asyncio.run(_heard(_said(HELLO, CHANGED, THERE)))


def test_a_stream_that_breaks_changes_nothing_of_what_is_said() -> None:
    async def talk(*, breaks: bool) -> list[Any]:
        server = FakeServer()
        async with server.async_client() as client, client.session(seed=1) as session:
            await _heard(session.turn([1, 2, 3], max_tokens=4))
            if breaks:
                server.break_streams()
            return [event.ids for event in await _heard(session.turn([4], max_tokens=4)) if isinstance(event, Tokens)]

    undisturbed = asyncio.run(talk(breaks=False))
    assert sum(map(len, undisturbed)) == 4
    assert sum(asyncio.run(talk(breaks=True)), ()) == sum(undisturbed, ())
