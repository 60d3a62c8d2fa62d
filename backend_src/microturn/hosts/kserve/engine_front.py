"""Hands turns to an engine in this process, and their answers to an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from microturn.engine.engine import Engine
from microturn.errors import MicroturnError
from microturn.hosts.answers import Answer, packed
from microturn.hosts.kserve.messages import read_request, response_to
from microturn.sessions.turn import Status, Turn, TurnOutput

# Called when a turn has been answered: with the turn, how it ended, and when sending its end began.
Answered = Callable[[Turn, Status | MicroturnError, float], None]


class AnswerQueue:
    """The sink of one turn; an event loop takes its answer.

    Args:
        loop: where `take` is awaited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._answers: deque[Answer] = deque()
        self._is_ready = asyncio.Event()

    def put(self, output: TurnOutput) -> None:
        self._post(output)

    def fail(self, error: MicroturnError) -> None:
        self._post(error)

    async def take(self) -> Answer:
        """What has been answered since the last time, as one; waits for it."""
        answers: list[Answer] = []
        while not answers:
            await self._is_ready.wait()
            self._is_ready.clear()
            while self._answers:
                answers.append(self._answers.popleft())
        return packed(answers)

    def _post(self, answer: Answer) -> None:
        self._answers.append(answer)
        if len(self._answers) == 1:  # otherwise `take` is about to find it beside the others
            self._loop.call_soon_threadsafe(self._is_ready.set)


class EngineFront:
    """An engine as a `Front`.

    Args:
        engine: runs in its own thread.
        config: the model's, see `envelope.config_response`.
        answered: called on the event loop.
        route: of this server among others; None if it is alone.
    """

    def __init__(self, engine: Engine, config: bytes, answered: Answered, route: str | None = None) -> None:
        self._engine = engine
        self._config = config
        self._answered = answered
        self._route = route
        self.is_ready = True

    async def open(self, route: str | None, tenant: str | None) -> EngineTurns:
        if not self._engine.settings.max_sessions_per_tenant:
            tenant = None  # a proxy may name one all the same
        return EngineTurns(self._engine, self._answered, self._route, tenant)

    async def model_config(self) -> bytes:
        return self._config


class EngineTurns:
    """The turns of one stream."""

    def __init__(self, engine: Engine, answered: Answered, route: str | None, tenant: str | None) -> None:
        self.route = route
        self._engine = engine
        self._answered = answered
        self._tenant = tenant

    async def begin(self, request: bytes, message: Any) -> EngineResponses:
        queue = AnswerQueue(asyncio.get_running_loop())
        turn = Turn(read_request(message, queue, self._tenant, self._engine.clock()))
        self._engine.submit(turn)
        return EngineResponses(self._engine, turn, queue, message.id, self._answered)

    async def watch(self) -> None:
        await asyncio.Event().wait()  # the engine goes with this process


class EngineResponses:
    """The responses to one turn; `aclose` before the last of them says that its client has gone."""

    def __init__(self, engine: Engine, turn: Turn, queue: AnswerQueue, request_id: str, answered: Answered) -> None:
        self._engine = engine
        self._turn = turn
        self._queue = queue
        self._request_id = request_id
        self._answered = answered
        self._has_ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if self._has_ended:
            raise StopAsyncIteration
        answer = await self._queue.take()
        begun_s = self._engine.clock()
        response = response_to(self._request_id, answer)
        end = answer if isinstance(answer, MicroturnError) else answer.status
        if end is not None:
            self._has_ended = True
            self._answered(self._turn, end, begun_s)
        return response

    def leave(self) -> None:
        """The turn's client has gone; what its turn then answers is still handed out."""
        if not self._has_ended:
            self._engine.cancel(self._turn)

    async def aclose(self) -> None:
        self.leave()
        self._has_ended = True
