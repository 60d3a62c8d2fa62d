"""Callers who want more than there is room for, and what they leave to others."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

from microturn_client.testing import FakeServer
from microturn_gateway import places as places_module
from microturn_gateway import response_store
from microturn_gateway.failures import Refusal
from microturn_gateway.places import Places
from support.chats import answered, ask, cached, gateway_before, named, question

LONG = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> FakeServer:
    return FakeServer(token_s=getattr(request, "param", 0.0))


async def test_who_begins_many_talks_takes_the_places_of_its_own(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=4) as openai:
        other = openai.with_options(api_key="other")
        messages = question("What grows here?")
        first = await ask(other, messages)
        for number in range(8):
            await ask(openai, question(f"What is the flower of day {number}?"))
        assert cached(await ask(other, answered(messages, first, "Why?"))) >= first.usage.total_tokens - 2


async def test_callers_that_hold_as_much_take_nothing_of_each_other(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=4) as openai:
        callers = [openai.with_options(api_key="other"), openai]
        talks = [(caller, question(f"What grows {where}?")) for caller in callers for where in ("here", "there")]
        firsts = [await ask(caller, messages) for caller, messages in talks]
        await ask(openai, question("And in a pot?"))
        for (caller, messages), first in list(zip(talks, firsts, strict=True))[:2]:
            assert cached(await ask(caller, answered(messages, first, "Why?"))) >= first.usage.total_tokens - 2


@pytest.mark.parametrize("server", [0.005], indirect=True)
async def test_who_was_refused_finds_its_share_when_it_comes_again(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that runs in all places and asks again at once got them all again, for ever."""
    async with gateway_before(server, monkeypatch, max_sessions=2) as openai:
        other = openai.with_options(api_key="other")
        running = [asyncio.create_task(ask(openai, question(f"Number {number}"), **LONG)) for number in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(sdk.RateLimitError) as refused:
            await ask(other, question("Why?"))
        assert refused.value.code == "too_many_sessions"
        assert float(refused.value.response.headers["retry-after"]) == 1
        await asyncio.gather(*running)
        again = [asyncio.create_task(ask(openai, question(f"Number {number}"), **LONG)) for number in range(2, 4)]
        await asyncio.sleep(0.05)
        assert (await ask(other, question("Why?"))).choices
        outcomes = await asyncio.gather(*again, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes if isinstance(outcome, Exception)] == [sdk.RateLimitError]


def test_a_caller_alone_has_all_places() -> None:
    places = Places(2)
    with places.take(b"one"), places.take(b"one"):
        assert places.num_taken == 2
        with pytest.raises(Refusal), places.take(b"one"):
            pass
    assert places.num_taken == 0


def test_nobody_is_waited_for_who_has_a_share_or_comes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    places, now_s = Places(4), 0.0
    monkeypatch.setattr(places_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(places.take(b"one"))
            running.enter_context(places.take(b"two"))
        with pytest.raises(Refusal), places.take(b"two"):  # it has its share
            pass
    with ExitStack() as running:
        for _ in range(4):
            running.enter_context(places.take(b"one"))
        with pytest.raises(Refusal), places.take(b"two"):
            pass
    with ExitStack() as running:
        for _ in range(2):
            running.enter_context(places.take(b"one"))
        with pytest.raises(Refusal), places.take(b"one"):
            pass
        now_s += 4.0
        for _ in range(2):
            running.enter_context(places.take(b"one"))


async def test_who_stores_many_responses_takes_the_room_of_its_own(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=1) as openai:
        other = openai.with_options(api_key="other")
        kept = await respond(other)
        stored = [await respond(openai) for _ in range(20)]
        assert (await other.responses.retrieve(kept.id)).id == kept.id
        assert (await openai.responses.retrieve(stored[-1].id)).id == stored[-1].id
        with pytest.raises(sdk.NotFoundError):
            await openai.responses.retrieve(stored[0].id)


async def test_a_response_that_is_longer_than_the_room_is_kept_alone(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=1) as openai:
        monkeypatch.setattr(response_store, "_MAX_CHARS", 20)
        kept = [await respond(openai, "So many characters do not fit.") for _ in range(2)]
        assert (await openai.responses.retrieve(kept[1].id)).id == kept[1].id
        with pytest.raises(sdk.NotFoundError):
            await openai.responses.retrieve(kept[0].id)


async def test_who_stores_long_responses_takes_the_room_of_its_own(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=1) as openai:
        other = openai.with_options(api_key="other")
        kept = await respond(other)
        monkeypatch.setattr(response_store, "_MAX_CHARS", 20_000)
        for number in range(4):
            await respond(openai, f"{number}" * 6000)
        assert (await other.responses.retrieve(kept.id)).id == kept.id


async def respond(openai: AsyncOpenAI, said: str = "What grows here?") -> Any:
    return await openai.responses.create(model=await named(openai), input=said, max_output_tokens=2)
