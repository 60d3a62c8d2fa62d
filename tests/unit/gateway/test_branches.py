"""The sessions of conversations that are sent whole, as the unmodified OpenAI SDK sees them before a fake server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

from microturn_client.testing import FakeServer
from microturn_client.testing._fake_session import FakeSession
from microturn_gateway.context import HeldContext
from support.chats import SYSTEM, Messages, answered, ask, cached, gateway_before, named, question

QUESTIONS = ["What grows here?", "And in the shade?", "Why?"]


@pytest.fixture
def server(request: pytest.FixtureRequest) -> FakeServer:
    return FakeServer(token_s=getattr(request, "param", 0.0))


@pytest.fixture
async def openai(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncOpenAI]:
    async with gateway_before(server, monkeypatch, max_sessions=4) as client:
        yield client


async def test_a_conversation_without_a_name_finds_what_it_left(openai: AsyncOpenAI) -> None:
    messages = question("What grows here?")
    for then in ["And in the shade?", "Why?"]:
        completion = await ask(openai, messages)
        messages = answered(messages, completion, then)
        next_one = await ask(openai, messages)
        assert cached(next_one) >= completion.usage.total_tokens - 2


async def test_each_branch_keeps_what_it_had(openai: AsyncOpenAI) -> None:
    messages = question("What grows here?")
    first = await ask(openai, messages)
    branches = [answered(messages, first, then) for then in ["And in the shade?", "And in the sun?"]]
    ends = [await ask(openai, branch) for branch in branches]
    assert all(cached(end) >= first.usage.total_tokens - 2 for end in ends)
    for branch, end in zip(branches, ends, strict=True):
        after = await ask(openai, answered(branch, end, "Why?"))
        assert cached(after) >= end.usage.total_tokens - 2


async def test_an_answer_asked_for_again_leaves_the_first_one_where_it_is(openai: AsyncOpenAI) -> None:
    messages = question("What grows here?")
    first = await ask(openai, messages)
    other = await ask(openai, messages, temperature=1.0, seed=3)
    assert cached(other) >= first.usage.prompt_tokens - 12
    assert other.choices[0].message.content != first.choices[0].message.content
    for end in (first, other):
        after = await ask(openai, answered(messages, end, "Why?"))
        assert cached(after) >= end.usage.total_tokens - 2


@pytest.mark.parametrize("server", [0.0, 0.002], indirect=True)
async def test_an_answer_asked_for_again_is_drawn_again(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered on a fork, which has its session's seed and the same positions."""
    async with gateway_before(server, monkeypatch, max_sessions=16) as openai:
        messages = question("What grows here?")
        drawn = [await ask(openai, messages, temperature=1.0) for _ in range(3)]
        drawn += await asyncio.gather(*(ask(openai, messages, temperature=1.0) for _ in range(3)))
        assert len({completion.choices[0].message.content for completion in drawn}) == 6
        told = {"instructions": SYSTEM["content"], "input": messages[1:], "temperature": 1.0, "max_output_tokens": 6}
        responses = [await openai.responses.create(model=await named(openai), **told) for _ in range(3)]
        assert len({response.output_text for response in responses}) == 3


@pytest.mark.parametrize("server", [0.0, 0.002], indirect=True)
async def test_with_its_seed_an_answer_is_the_same_again(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=16) as openai:
        messages = question("What grows here?")
        drawn = [await ask(openai, messages, temperature=1.0, seed=3) for _ in range(2)]
        drawn += await asyncio.gather(*(ask(openai, messages, temperature=1.0, seed=3) for _ in range(3)))
        assert len({completion.choices[0].message.content for completion in drawn}) == 1


@pytest.mark.parametrize("server", [0.02], indirect=True)
async def test_an_answer_whose_server_dies_goes_on_as_it_was_drawn(
    server: FakeServer, openai: AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []
    usual = FakeSession.status_of
    monkeypatch.setattr(
        FakeSession, "status_of", lambda session, *how: seeds.append((said := usual(session, *how))["seed"]) or said
    )
    messages = question("What grows here?")
    running = asyncio.create_task(ask(openai, messages, temperature=1.0, max_tokens=30))
    await asyncio.sleep(0.3)
    assert not running.done()
    server.restart()
    survived = await running
    again = await ask(openai, messages, temperature=1.0, max_tokens=30, seed=seeds[-1])
    assert again.choices[0].message.content == survived.choices[0].message.content


async def test_a_session_is_found_without_a_look_at_each(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of all sessions was compared on the event loop: of 512 that took 30 ms for each request."""
    async with gateway_before(server, monkeypatch, max_sessions=64) as openai:
        messages = question("What grows here?")
        first = await ask(openai, messages)
        for number in range(40):
            await ask(openai, question(f"What is the flower of day {number}?"))
        compared = []
        usual = HeldContext.recognised
        monkeypatch.setattr(HeldContext, "recognised", lambda held, said: compared.append(held) or usual(held, said))
        assert cached(await ask(openai, answered(messages, first, "Why?"))) >= first.usage.total_tokens - 2
        await ask(openai, question("And in a pot?"))
        assert len(compared) < 8


async def test_chats_and_responses_find_the_same_sessions(openai: AsyncOpenAI) -> None:
    messages = question("What grows here?")
    first = await ask(openai, messages)
    said = answered(messages, first, "Why?")
    response = await openai.responses.create(
        model=await named(openai), instructions=SYSTEM["content"], input=said[1:], max_output_tokens=6
    )
    assert response.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 2


async def test_nobody_hears_of_the_sessions_of_others(openai: AsyncOpenAI) -> None:
    messages = question("What grows here?")
    first = await ask(openai, messages)
    stranger = openai.with_options(api_key="other")
    assert cached(await ask(stranger, answered(messages, first, "Why?"))) == 0


@pytest.mark.parametrize("server", [0.005], indirect=True)
async def test_an_answer_that_runs_keeps_nobody_waiting(openai: AsyncOpenAI) -> None:
    messages = question("What grows here?")
    first = await ask(openai, messages)
    said = answered(messages, first, "And what in the shade of a tree?")
    running = asyncio.create_task(ask(openai, said, max_tokens=400, extra_body={"ignore_eos": True}))
    await asyncio.sleep(0.2)
    beside = await ask(openai, said)
    assert not running.done()
    # The session is forked as it was before the answer: what it had been asked then is there too.
    assert cached(beside) >= first.usage.total_tokens + len("And what in the shade of")
    assert (await running).choices[0].message.content.startswith(beside.choices[0].message.content)


@pytest.mark.parametrize("server", [0.02], indirect=True)
async def test_a_session_is_forked_while_a_server_is_told_it_again(server: FakeServer, openai: AsyncOpenAI) -> None:
    """Answers went on from an empty context, or were refused each time that they were asked for."""
    messages = question("What grows here?")
    first = await ask(openai, messages)
    said = answered(messages, first, "And in the shade of a tree?")
    second = await ask(openai, said)
    server.restart()
    while not server.num_sessions:
        await asyncio.sleep(0)
    for asked, answer in ((said, second), (messages, first)):
        again = await ask(openai, asked)
        assert again.choices[0].message.content == answer.choices[0].message.content
        assert cached(again) >= answer.usage.prompt_tokens - len("And in the shade of a tree?")


async def test_a_session_that_is_not_what_it_was_is_told_again(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rewind was refused, and the next request found the same session."""
    async with gateway_before(server, monkeypatch, max_sessions=1) as openai:
        messages = question("What grows here?")
        first = await ask(openai, messages)
        [session] = server._sessions._sessions.values()
        session.cut(3)
        again = await ask(openai, messages)
        assert again.choices[0].message.content == first.choices[0].message.content


@pytest.mark.parametrize("server", [0.005], indirect=True)
async def test_who_finds_no_place_is_told_so_at_once(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=1) as openai:
        running = asyncio.create_task(ask(openai, question("Why?"), max_tokens=400, extra_body={"ignore_eos": True}))
        await asyncio.sleep(0.2)
        with pytest.raises(sdk.RateLimitError) as refused:
            await ask(openai, question("Why?"))
        assert refused.value.code == "too_many_sessions"
        assert not running.done()
        await running


async def test_where_there_is_one_place_a_branch_takes_that_of_the_other(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=1) as openai:
        messages = question("What grows here?")
        first = await ask(openai, messages)
        again = await ask(openai, messages)
        assert again.choices[0].message.content == first.choices[0].message.content
        assert cached(again) >= first.usage.prompt_tokens - 12
        assert server.num_sessions == 1


async def test_two_hundred_callers_with_branches_are_answered_as_if_alone(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask the same few questions, two at a time each."""
    async with gateway_before(server, monkeypatch, max_sessions=800) as openai:
        talk = Talk(server, openai, max_sessions=800)
        callers = [openai.with_options(api_key=f"caller {number}") for number in range(200)]
        await asyncio.gather(*(talk.hold(caller, random.Random(number), 3, 2) for number, caller in enumerate(callers)))
        await talk.check()
    assert talk.num_cached > 200


@pytest.mark.parametrize("server", [0.0, 0.001], indirect=True)
@pytest.mark.parametrize("max_sessions", [1, 3, 5])
async def test_branches_that_take_places_from_each_other_are_answered_as_if_alone(
    server: FakeServer, max_sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_before(server, monkeypatch, max_sessions=max_sessions) as openai:
        talk = Talk(server, openai, max_sessions=max_sessions)
        for seed in range(8):
            await talk.hold(openai, random.Random(seed), 6, 3)
        await talk.check()
    assert talk.num_cached > 20


class Talk:
    """What callers are told, all of which must be what they would be told alone."""

    def __init__(self, server: FakeServer, openai: AsyncOpenAI, max_sessions: int) -> None:
        self.num_cached = 0
        self._server = server
        self._openai = openai
        self._max_sessions = max_sessions
        self._answers: dict[str, tuple[Messages, str]] = {}

    async def hold(self, caller: AsyncOpenAI, draw: random.Random, num_steps: int, num_at_once: int) -> None:
        """Goes on from any point of what was said, several times at once."""
        known: list[Messages] = [[SYSTEM]]
        for _ in range(num_steps):
            asked = [
                [*draw.choice(known), {"role": "user", "content": draw.choice(QUESTIONS)}] for _ in range(num_at_once)
            ]
            completions = await asyncio.gather(*(asked_until_there_is_room(caller, messages) for messages in asked))
            for messages, completion in zip(asked, completions, strict=True):
                text = completion.choices[0].message.content
                assert self._answers.setdefault(repr(messages), (messages, text))[1] == text
                self.num_cached += cached(completion) > len(SYSTEM["content"])
                known.append([*messages, {"role": "assistant", "content": text}])
            assert self._server.num_sessions <= self._max_sessions

    async def check(self) -> None:
        """Asks the same of sessions that nobody shares."""
        for number, (messages, text) in enumerate(self._answers.values()):
            alone = await ask(self._openai.with_options(api_key=f"alone {number}"), messages)
            assert (alone.choices[0].message.content, cached(alone)) == (text, 0)


async def asked_until_there_is_room(openai: AsyncOpenAI, messages: Messages) -> Any:
    while True:
        try:
            return await ask(openai, messages)
        except sdk.RateLimitError:
            await asyncio.sleep(0.002)
