"""What a client calls its conversation breaks ties, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI

from microturn_client.testing import FakeServer
from microturn_gateway.branches import Branch, Branches
from microturn_gateway.caller import Caller
from microturn_gateway.context import Cut, Message, Piece
from microturn_gateway.sessions import Sessions
from support.chats import answered, ask, cached, gateway_before, named, question

OURS = hash("ours")
QUESTION = Message("user", "What grows here?")
# As a client sends back the half that was heard, whichever of two answers it was.
HEARD = [QUESTION, Message("assistant", "Roses"), Message("user", "Stop")]


@pytest.fixture
async def openai(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_before(FakeServer(), monkeypatch, max_sessions=8) as client:
        yield client


@pytest.fixture
def branches() -> Branches:
    return Branches(Sessions(FakeServer().async_client()), max_open=8, idle_timeout_s=60)


async def answer(branches: Branches, hint: int | None, text: str) -> Branch:
    """A request that asks the question and is answered, on a session of its own."""
    async with branches.hold(Caller(b"one", hint=hint), (), [], keeps=True) as branch:
        end = len(QUESTION.content)
        branch.context.append(QUESTION, end)
        cuts = tuple(Cut(num, end + num) for num in range(len(text) + 1))
        branch.context.answer(Piece("assistant", text, end + len(text), cuts), end + len(text))
    return branch


async def found(branches: Branches, hint: int | None) -> Branch:
    async with branches.hold(Caller(b"one", hint=hint), (), HEARD, keeps=True) as branch:
        return branch


async def test_of_two_that_hold_as_much_the_one_of_the_hint_is_taken(branches: Branches) -> None:
    ours = await answer(branches, OURS, "Roses and thyme")
    other = await answer(branches, hash("other"), "Roses, nothing else")
    assert await found(branches, OURS) is ours
    assert await found(branches, hash("other")) is other


@pytest.mark.parametrize("hint", [None, hash("unknown")], ids=["none", "unknown"])
async def test_a_hint_that_nobody_knows_changes_nothing(branches: Branches, hint: int | None) -> None:
    await answer(branches, OURS, "Roses and thyme")
    latest = await answer(branches, None, "Roses, nothing else")
    assert await found(branches, hint) is latest


async def test_the_longest_beginning_is_taken_whatever_the_hint(branches: Branches) -> None:
    await answer(branches, OURS, "Rosemary")
    longest = await answer(branches, None, "Roses and thyme")
    assert await found(branches, OURS) is longest


@pytest.mark.parametrize(
    ("hint", "is_given"),
    [
        ({"extra_headers": {"x-session-id": "ours", "X-OpenWebUI-Chat-Id": "other"}}, True),
        ({"extra_headers": {"X-OpenWebUI-Chat-Id": "ours"}, "prompt_cache_key": "other"}, True),
        ({"prompt_cache_key": "ours"}, True),
        ({"user": "ours"}, False),
    ],
)
async def test_clients_give_it_by_a_header_or_in_the_body(
    openai: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, hint: dict[str, Any], is_given: bool
) -> None:
    callers: list[Caller] = []
    usual = Branches.hold
    monkeypatch.setattr(
        Branches, "hold", lambda self, caller, *told, **how: callers.append(caller) or usual(self, caller, *told, **how)
    )
    messages = question("What grows here?")
    first = await ask(openai, messages, **hint)
    second = await ask(openai, answered(messages, first, "Why?"), **hint)
    assert cached(second) >= first.usage.total_tokens - 2
    await openai.responses.create(model=await named(openai), input="Why?", max_output_tokens=2, **hint)
    assert [caller.hint for caller in callers] == [OURS if is_given else None] * 3
