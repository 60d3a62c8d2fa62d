"""A whole conversation answered on a session that may hold its beginning: for APIs that send conversations whole."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import ClientDisconnect

from microturn_client import (
    AsyncSession,
    AsyncTurn,
    ContextFull,
    FailedPrecondition,
    MicroturnError,
    Tokens,
    ToolEvent,
    TurnEnd,
)
from microturn_gateway.answer import GeneratedText, PromptCount
from microturn_gateway.branches import Branch, Branches
from microturn_gateway.caller import Caller
from microturn_gateway.chat_tools import Tools
from microturn_gateway.context import Message
from microturn_gateway.sessions import LOST, events_of
from microturn_gateway.settings import GatewaySettings

# Messages that are appended at once: as many turns as a server lets wait in a session by default.
_NUM_TOGETHER = 8

# After these a session is given up: it is lost, or its context is not the one that is held, since that has the position
# to which each turn rewinds.
_GIVEN_UP = (*LOST, FailedPrecondition)

_Event = Tokens | ToolEvent | TurnEnd
Events = AsyncGenerator[_Event]


class Client(Protocol):
    """Who waits for an answer."""

    @property
    def is_broken(self) -> bool:
        """Whether the client takes no more."""

    async def left(self) -> None:
        """Returns when the client has closed the connection."""


@dataclass(frozen=True)
class Question:
    """What is to be answered.

    Attributes:
        conversation: what the context shall be.
        tools: that the model may call.
        generation: options of the answer, as the wire contract names them.
        max_tokens: most tokens of it; None is as many as there is room for, and 0 only prepares the context.
        keeps: whether the next request may find what it left.
    """

    conversation: Sequence[Message]
    tools: Tools
    generation: Mapping[str, Any]
    max_tokens: int | None
    keeps: bool = True


class Exchange:
    """One request on its session.

    Attributes:
        generated: what was answered so far.
        count: of the prompt's tokens.

    Args:
        branches: to answer on.
        caller: who asks.
        settings: of the gateway.
        client: that asks. Once it takes no more, what was said until then stays in the context.
    """

    def __init__(self, branches: Branches, caller: Caller, settings: GatewaySettings, client: Client) -> None:
        self.generated = GeneratedText()
        self.count = PromptCount(0)
        self._client = client
        self._branches = branches
        self._caller = caller
        self._settings = settings
        self._session: AsyncSession | None = None
        self._turn: AsyncTurn | None = None
        self._interrupting: AsyncTurn | None = None

    @contextlib.asynccontextmanager
    async def answer(self, question: Question) -> AsyncIterator[Events]:
        """The events of the answer, the last a `TurnEnd`. A client that closes the connection interrupts it.

        Args:
            question: what is to be answered.

        Raises:
            MicroturnError: as iterating over a turn does.
            Refusal: there is no room for a session.
            ClientDisconnect: the client left before the answer began; what was told until then stays.
        """
        leaving = asyncio.create_task(self._watch())
        try:
            async with (
                self._branches.hold(
                    self._caller, question.tools.described, question.conversation, keeps=question.keeps
                ) as branch,
                contextlib.aclosing(self._events(branch, question)) as events,
            ):
                try:
                    yield events
                except _GIVEN_UP:
                    branch.is_lost = True
                    raise
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def _watch(self) -> None:
        await self._client.left()
        self._interrupt()

    def _interrupt(self) -> None:
        """Ends the turn, if there is one: nobody reads it."""
        if self._turn is not None and self._session is not None and self._interrupting is None:
            with contextlib.suppress(MicroturnError):  # what befell the session its turn says too
                self._interrupting = self._session.turn(None, max_tokens=0, on_overlap="interrupt")

    async def _events(self, branch: Branch, question: Question) -> Events:
        """Brings the context to the conversation, and yields the events of the answer.

        Where the session has gone meanwhile, another one answers, as long as nothing was yielded.
        """
        try:
            event, events = await self._ask(branch, question)
        except _GIVEN_UP:
            branch.withdraw()
            await branch.renew()
            event, events = await self._ask(branch, question)
        has_surplus = False
        while not isinstance(event, TurnEnd):
            has_surplus |= question.tools.has_one_call and self.generated.is_called_again_by(event)
            if not has_surplus:
                self.generated.take(event)
                yield event
            if has_surplus or self._client.is_broken:
                self._interrupt()
            event = await anext(events)
        self._turn = None  # there is nothing left to interrupt
        self.count.take(event.status)
        if question.max_tokens == 0 or has_surplus:  # what the next request takes for the answer is told again
            branch.context.rewound(event.status.context_len)
        else:
            branch.context.answer(self.generated.piece(event.status), event.status.context_len)
        if self._interrupting is not None:
            await self._interrupting.wait()
        # With the one call that it may have an answer is complete, whatever has ended its turn.
        yield TurnEnd(replace(event.status, finish_reason="stop")) if has_surplus else event

    async def _ask(self, branch: Branch, question: Question) -> tuple[_Event, AsyncIterator[_Event]]:
        """Begins the answer, behind what of the conversation the session does not hold yet.

        Returns:
            Its first event, and those behind it.
        """
        held_len = branch.context.context_len
        missing = branch.context.become(branch.context.recognised(question.conversation))
        if missing is None:
            await branch.renew()
            missing = branch.context.become(question.conversation) or []
        context = branch.context
        self.count = PromptCount(min(held_len, context.end))
        num_together = 1 if question.keeps else _NUM_TOGETHER
        for index in range(0, len(missing), num_together):
            self._check_client()
            await self._append(branch, missing[index : index + num_together])
        if question.max_tokens != 0:
            context.go_on()
        options = self._options(question)
        try:
            return await self._begin(branch, options)
        except ContextFull as error:
            room = error.details.get("room", 0)
            if question.max_tokens is not None or not room:
                raise
            # Only the server knows how long text is that it holds and that has no tokens yet.
            return await self._begin(branch, {**options, "max_tokens": room})

    async def _begin(self, branch: Branch, options: Mapping[str, Any]) -> tuple[_Event, AsyncIterator[_Event]]:
        self._check_client()
        branch.offer()
        self._session = branch.session
        self._turn = branch.session.turn(None, **options, **branch.context.rewinding)
        events = events_of(self._turn)
        return await anext(events), events

    def _check_client(self) -> None:
        if self._client.is_broken:
            raise ClientDisconnect

    async def _append(self, branch: Branch, messages: Sequence[Message]) -> None:
        """Appends messages to the context, computed together: each interrupts the one before, whose input stays.

        Where one of several ends is not known, so for what shall be gone on from each is appended by itself.
        """
        turns: list[AsyncTurn] = []
        for message in messages:
            how = {"on_overlap": "interrupt"} if turns else branch.context.rewinding
            turns.append(branch.session.turn(message.content, role=message.role, max_tokens=0, **how))
        for message, turn in zip(messages, turns, strict=True):
            *_, end = [event async for event in events_of(turn)]
            assert isinstance(end, TurnEnd)
            branch.context.append(message, end.status.context_len)
            self.count.take(end.status)

    def _options(self, question: Question) -> dict[str, Any]:
        most = question.max_tokens
        if most == 0:
            return {"max_tokens": 0}
        if most is None:
            most = self._settings.max_answer_tokens
        # Each answer has a seed of its own: a fork, on which an answer is asked for again, has that of its session.
        return {"seed": secrets.randbits(63), **question.generation, "role": "assistant", "max_tokens": most}
