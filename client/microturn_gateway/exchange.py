"""A whole conversation answered on a session that may hold its beginning: for APIs that send conversations whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive, Send

from microturn_client import AsyncSession, AsyncTurn, MicroturnError, Tokens, ToolEvent, TurnEnd
from microturn_gateway.answer import GeneratedText, PromptCount
from microturn_gateway.context import HeldContext, Message
from microturn_gateway.event_stream import EventStream
from microturn_gateway.options import room_for_answer
from microturn_gateway.sessions import LOST, Model, events_of
from microturn_gateway.settings import GatewaySettings


class Held(Protocol):
    """A session, and what is known of its context."""

    session: AsyncSession
    context: HeldContext


@dataclass(frozen=True)
class Question:
    """What is to be answered.

    Attributes:
        conversation: what the context shall be, by what it is.
        generation: options of the answer, as the wire contract names them.
        max_tokens: most tokens of it; None is as many as there is room for.
        renew: gives the holder another session, which holds nothing.
    """

    conversation: Callable[[HeldContext], Sequence[Message]]
    generation: Mapping[str, Any]
    max_tokens: int | None
    renew: Callable[[], Awaitable[None]]


class Exchange:
    """One request on its session.

    Attributes:
        generated: what was answered so far.
        count: of the prompt's tokens.
        stream: to the client. Once that takes no more, what was said until then stays in the context.

    Args:
        model: that answers.
        settings: of the gateway.
        send: of the ASGI request.
    """

    def __init__(self, model: Model, settings: GatewaySettings, send: Send) -> None:
        self.generated = GeneratedText()
        self.count = PromptCount(0)
        self.stream = EventStream(send, settings.send_timeout_s)
        self._model = model
        self._settings = settings
        self._session: AsyncSession | None = None
        self._turn: AsyncTurn | None = None
        self._interrupting: AsyncTurn | None = None

    @contextlib.asynccontextmanager
    async def watched(self, receive: Receive) -> AsyncIterator[None]:
        """While the block runs, a client that closes the connection interrupts the turn."""
        leaving = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.stream.is_broken = True
        self._interrupt()

    def _interrupt(self) -> None:
        """Ends the turn, if there is one: nobody reads it."""
        if self._turn is not None and self._session is not None and self._interrupting is None:
            with contextlib.suppress(MicroturnError):  # what befell the session its turn says too
                self._interrupting = self._session.turn(None, max_tokens=0, on_overlap="interrupt")

    async def answer(self, held: Held, question: Question) -> AsyncGenerator[Tokens | ToolEvent | TurnEnd]:
        """Brings the context to the conversation, and yields the events of the answer.

        Where the session has gone meanwhile, another one answers, as long as nothing was yielded.

        Raises:
            MicroturnError: as iterating over a turn does.
        """
        try:
            events = await self._ask(held, question)
            event = await anext(events)
        except LOST:
            await question.renew()
            events = await self._ask(held, question)
            event = await anext(events)
        while not isinstance(event, TurnEnd):
            self.generated.take(event)
            yield event
            if self.stream.is_broken:
                self._interrupt()
            event = await anext(events)
        self._turn = None  # there is nothing left to interrupt
        self.count.take(event.status)
        held.context.answer(self.generated.piece(event.status), event.status.context_len)
        if self._interrupting is not None:
            await self._interrupting.wait()
        yield event

    async def _ask(self, held: Held, question: Question) -> AsyncIterator[Tokens | ToolEvent | TurnEnd]:
        """Begins the answer, behind what of the conversation the session does not hold yet."""
        held_len = held.context.context_len
        missing = held.context.become(question.conversation(held.context))
        if missing is None:
            await question.renew()
            missing = held.context.become(question.conversation(held.context)) or []
        context = held.context
        self.count = PromptCount(min(held_len, context.end))
        for message in missing:
            turn = held.session.turn(message.content, role=message.role, max_tokens=0, **_rewinding(context))
            *_, end = [event async for event in events_of(turn)]
            assert isinstance(end, TurnEnd)
            context.append(message, end.status.context_len)
            self.count.take(end.status)
        most = question.max_tokens
        if most is None:
            most = room_for_answer(context.end, self._model.max_context, self._settings.max_answer_tokens)
        options: dict[str, Any] = {**question.generation, **_rewinding(context), "max_tokens": most}
        self._session = held.session
        self._turn = held.session.turn(None, role="assistant", **options)
        if self.stream.is_broken:
            self._interrupt()
        return events_of(self._turn)


def _rewinding(context: HeldContext) -> Any:
    return {} if context.rewind_to is None else {"rewind_to": context.rewind_to}
