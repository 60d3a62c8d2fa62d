"""The model process dies: what its clients see, how soon the server is back, and what has become of their sessions.

The real model behind the real supervisor, seen through the client library, which is told to survive nothing here (what
it survives is in test_client_survival.py). That a supervisor replaces whatever died is
in test_serve.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import Any

from transformers import PreTrainedModel

from microturn_client import (
    AsyncClient,
    Client,
    ConnectionLost,
    MicroturnError,
    NotFound,
    Session,
    SessionId,
    Tokens,
    Unavailable,
)
from microturn_client._errors import from_wire
from support.oracle import stock_greedy
from support.raw import RawStream, ids

NUM_CLIENTS = 8
# Loading the model takes 7 s on a quiet machine, and many times as long on one that others use too.
BACK_WITHIN_S = 90.0
# How soon the death is told to who waits: far from the turns' own time limit.
TURN_TIMEOUT_S = 60.0
TOLD_WITHIN_S = 15.0
ENDLESS = {"max_tokens": 4000, "ignore_eos": True, "timeout_s": TURN_TIMEOUT_S}
GENERATE = {"max_tokens": 10, "ignore_eos": True}


def prompt_of(number: int) -> list[int]:
    return list(range(1000 + 500 * number, 1030 + 500 * number + number))


@dataclass
class Experience:
    """What one client went through.

    Attributes:
        session_id: of the session that was there when the model process died.
        failure: how its turn ended; None is a turn that ended as if nothing had happened.
        failed_s: when it ended, by the monotonic clock.
        afterwards: what came of the same session's next turn.
        answer: tokens of its new session, opened on the same connection when the server was back.
    """

    session_id: SessionId
    failure: MicroturnError | None = None
    failed_s: float = 0.0
    afterwards: MicroturnError | None = None
    answer: list[int] = field(default_factory=list)


class Scene:
    """When which client has come how far."""

    def __init__(self) -> None:
        self.streaming: SimpleQueue[int] = SimpleQueue()
        self.is_back = Event()


def talk(address: str, number: int, scene: Scene) -> Experience:
    """One client with threads: streams until its turn fails, and begins anew when the server is back."""
    prompt = prompt_of(number)
    with Client(address, recovery=None) as client:
        session = client.session()
        session.append(prompt)
        experience = Experience(session.id)
        try:
            for event in session.turn(**ENDLESS):
                assert isinstance(event, Tokens)
                scene.streaming.put(number)
        except MicroturnError as error:
            experience.failure = error
        experience.failed_s = time.monotonic()
        experience.afterwards = failure_of(lambda: session.append([5]))
        assert scene.is_back.wait(2 * BACK_WITHIN_S)
        with client.session() as new:
            experience.answer = generate(new, prompt)
    return experience


async def talk_asyncio(address: str, number: int, scene: Scene) -> Experience:
    """The same with asyncio."""
    prompt = prompt_of(number)
    async with AsyncClient(address, recovery=None) as client:
        session = client.session()
        await session.append(prompt)
        experience = Experience(session.id)
        try:
            async for event in session.turn(**ENDLESS):
                assert isinstance(event, Tokens)
                scene.streaming.put(number)
        except MicroturnError as error:
            experience.failure = error
        experience.failed_s = time.monotonic()
        try:
            await session.append([5])
        except MicroturnError as error:
            experience.afterwards = error
        assert await asyncio.to_thread(scene.is_back.wait, 2 * BACK_WITHIN_S)
        async with client.session() as new:
            turn = new.turn(prompt, **GENERATE)
            experience.answer = [i async for event in turn if isinstance(event, Tokens) for i in event.ids]
    return experience


def talk_in_a_loop(address: str, number: int, scene: Scene) -> Experience:
    return asyncio.run(talk_asyncio(address, number, scene))


def generate(session: Session, given: list[int]) -> list[int]:
    return [i for event in session.turn(given, **GENERATE) if isinstance(event, Tokens) for i in event.ids]


def failure_of(call: Callable[[], object]) -> MicroturnError | None:
    try:
        call()
    except MicroturnError as error:
        return error
    return None


def kill_model_process(served: Any) -> float:
    """Kills the model process with SIGKILL; returns when."""
    process = served.model_process()
    killed_s = time.monotonic()
    process.kill()
    return killed_s


def wait_until_back(served: Any, killed_s: float) -> float:
    """Follows the supervisor's health service; returns the seconds from the death until it said SERVING again."""
    served.wait_for_health("NOT_SERVING")
    served.wait_for_health("SERVING", BACK_WITHIN_S)
    return time.monotonic() - killed_s


def refusal(raw: RawStream, session_id: SessionId) -> MicroturnError:
    """The error of a turn that takes for granted that the session is there."""
    answer = raw.ask(session_id, input_ids=ids(5), options={"max_tokens": 4})
    assert answer.token_ids == []
    assert answer.status is None
    assert answer.error is not None
    return from_wire(answer.error)


def test_a_death_under_load_is_told_to_everybody_and_over_soon(served_model: Any, smollm2: PreTrainedModel) -> None:
    """B8: a worker restarted, and turns went on as if nothing had happened, or with an empty context.

    Triton by itself lets the streams hang for ever, and stays ready.
    """
    address, scene = served_model.address, Scene()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool, ExitStack() as always:
        always.callback(scene.is_back.set)
        talks = [talk, talk_in_a_loop]
        clients: list[Future[Experience]] = [
            pool.submit(talks[number % 2], address, number, scene) for number in range(NUM_CLIENTS)
        ]
        streaming: set[int] = set()
        while len(streaming) < NUM_CLIENTS:
            streaming.add(scene.streaming.get(timeout=60))
        killed_s = kill_model_process(served_model)
        down_s = wait_until_back(served_model, killed_s)
        with Client(address) as client, client.session() as session:
            first_answer = generate(session, prompt_of(0))
        answered_s = time.monotonic() - killed_s
        scene.is_back.set()
        experiences = [client.result(60) for client in clients]

    assert down_s <= BACK_WITHIN_S
    assert answered_s <= BACK_WITHIN_S
    for experience in experiences:
        assert isinstance(experience.failure, Unavailable)
        assert str(experience.failure).startswith("the stream ended: ")
        assert experience.failed_s - killed_s < TOLD_WITHIN_S
        assert isinstance(experience.afterwards, ConnectionLost)
    with RawStream(address) as raw:
        for experience in experiences:
            assert isinstance(refusal(raw, experience.session_id), NotFound)
    expected = [stock_greedy(smollm2, prompt_of(number), 10) for number in range(NUM_CLIENTS)]
    assert first_answer == expected[0]
    assert [experience.answer for experience in experiences] == expected


def test_a_session_that_was_parked_is_not_continued_with_an_empty_context(
    served_model: Any, smollm2: PreTrainedModel
) -> None:
    """B8, for sessions without a turn when the model process dies.

    The next turn of some comes at once, while a dead model process still has a Triton before it, and of others when
    the server is back. The keep-alives of one do not bring it back either.
    """
    prompt = prompt_of(1)
    with Client(served_model.address, timeout_s=TURN_TIMEOUT_S, recovery=None) as client:
        soon = [client.session(session_id=f"parked-{time.monotonic_ns()}"), client.session()]
        late = [client.session(), client.session(idle_timeout_s=3.0)]
        for session in (*soon, *late):
            session.append(prompt)
        killed_s = kill_model_process(served_model)
        failures = [failure_of(partial(session.append, [5])) for session in soon]
        assert time.monotonic() - killed_s < TOLD_WITHIN_S
        wait_until_back(served_model, killed_s)
        failures += [failure_of(partial(session.append, [5])) for session in late]
        assert [isinstance(failure, Unavailable) for failure in failures] == [True] * 4
        with RawStream(served_model.address) as raw:
            for session in (*soon, *late):
                assert isinstance(refusal(raw, session.id), NotFound)
        with client.session() as new:
            assert generate(new, prompt) == stock_greedy(smollm2, prompt, 10)
            assert new.context_len == len(prompt) + 10
