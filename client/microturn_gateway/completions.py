"""`/v1/chat/completions`: a request brings the whole conversation, and its session computes what is new in it.

An ASGI application of its own, since it listens for the client's leaving while it answers: closing the connection
interrupts, so that what was said until then stays in the context and nothing more is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from microturn_client import AsyncTurn, MicroturnError, Status, Tokens, ToolCallBegun, ToolEvent, TurnEnd
from microturn_gateway.access import Access
from microturn_gateway.answer import GeneratedText, PromptCount
from microturn_gateway.chat_answer import END_OF_STREAM, ChatAnswer
from microturn_gateway.chat_request import ChatRequest, parse_chat_request
from microturn_gateway.chat_sessions import ChatSession, ChatSessions
from microturn_gateway.failures import Refusal, from_client
from microturn_gateway.http import read_body, refused
from microturn_gateway.options import room_for_answer
from microturn_gateway.sessions import LOST, Model, Sessions, events_of
from microturn_gateway.settings import GatewaySettings

SESSION_HEADER = "x-session-id"
_MAX_NAME_LEN = 256


class Completions:
    """The endpoint."""

    def __init__(self, access: Access, sessions: Sessions, chats: ChatSessions, settings: GatewaySettings) -> None:
        self._access = access
        self._sessions = sessions
        self._chats = chats
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive)
        try:
            self._access.check_place(request.headers)
            self._access.check_token(request.headers)
            asked = parse_chat_request(await read_body(request, self._settings.max_body_bytes))
            model = await self._sessions.model(asked.model)
            name = request.headers.get(SESSION_HEADER) or asked.user
            if name is not None and len(name) > _MAX_NAME_LEN:
                raise Refusal("invalid_value", f"a session's name has at most {_MAX_NAME_LEN} characters")
            async with self._chats.hold(name) as chat:
                exchange = _Exchange(chat, asked, model, self._settings, send)
                leaving = asyncio.create_task(exchange.watch(receive))
                try:
                    await exchange.run()
                finally:
                    leaving.cancel()
                    await asyncio.gather(leaving, return_exceptions=True)
        except ClientDisconnect:
            return  # before it had said all
        except Refusal as refusal:
            await refused(refusal)(scope, receive, send)


class _Exchange:
    """One request on its session."""

    def __init__(
        self, chat: ChatSession, asked: ChatRequest, model: Model, settings: GatewaySettings, send: Send
    ) -> None:
        self._chat = chat
        self._asked = asked
        self._model = model
        self._settings = settings
        self._send = send
        self._answer = ChatAnswer(model.name)
        self._generated = GeneratedText()
        self._count = PromptCount(0)
        self._turn: AsyncTurn | None = None
        self._events: AsyncIterator[Tokens | ToolEvent | TurnEnd] | None = None
        self._interrupting: AsyncTurn | None = None
        self._num_calls = 0
        self._has_sent = False
        self._has_left = False

    async def watch(self, receive: Receive) -> None:
        """Waits for the client to leave."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()

    async def run(self) -> None:
        """Brings the context to the conversation, answers, and notes what stays.

        Raises:
            Refusal: it was refused, and nothing has been sent yet.
        """
        try:
            await self._tell(await self._first_event())
            if self._interrupting is not None:
                await self._interrupting.wait()
        except MicroturnError as error:
            self._chat.is_lost = isinstance(error, LOST)
            if not self._has_sent:
                raise from_client(error) from error
            await self._send_text(self._answer.error(from_client(error).as_json()), ends=True)

    async def _first_event(self) -> Tokens | ToolEvent | TurnEnd:
        """What the answer begins with; where the session has gone meanwhile, that of another one."""
        try:
            return await self._ask()
        except LOST:
            await self._chat.renew(self._asked.tools.described)
            return await self._ask()

    async def _ask(self) -> Tokens | ToolEvent | TurnEnd:
        chat, asked = self._chat, self._asked
        if chat.tools != asked.tools.described:
            await chat.renew(asked.tools.described)
        target = chat.context.recognised(asked.messages)
        held_len = chat.context.context_len
        missing = chat.context.become(target)
        if missing is None:
            await chat.renew(asked.tools.described)
            missing = chat.context.become(target) or []
        self._count = PromptCount(min(held_len, chat.context.end))
        for message in missing:
            options = self._rewinding
            turn = chat.session.turn(message.content, role=message.role, max_tokens=0, **options)
            status = await _status_of(turn)
            chat.context.append(message, status.context_len)
            self._count.take(status)
        most = asked.max_tokens
        if most is None:
            most = room_for_answer(chat.context.end, self._model.max_context, self._settings.max_answer_tokens)
        options = {**asked.generation, **self._rewinding, "max_tokens": most}
        self._turn = chat.session.turn(None, role="assistant", **options)
        if self._has_left:
            self._leave()
        self._events = events_of(self._turn)
        return await anext(self._events)

    @property
    def _rewinding(self) -> Any:
        rewind_to = self._chat.context.rewind_to
        return {} if rewind_to is None else {"rewind_to": rewind_to}

    async def _tell(self, event: Tokens | ToolEvent | TurnEnd) -> None:
        assert self._events is not None
        if self._asked.streams:
            await self._send_start()
            await self._send_text(self._answer.begin())
        while not isinstance(event, TurnEnd):
            self._generated.take(event)
            if self._asked.streams:
                await self._send_news(event)
            event = await anext(self._events)
        self._turn = None  # there is nothing left to interrupt
        status = event.status
        self._count.take(status)
        self._chat.context.answer(self._generated.piece(status), status.context_len)
        if not self._asked.streams:
            whole = self._answer.whole(self._generated.text, self._generated.calls, status, self._count)
            self._has_sent = True
            await JSONResponse(whole)({"type": "http"}, _nothing, self._send)
            return
        await self._send_text(self._answer.end(status, has_called=bool(self._generated.calls)))
        if self._asked.includes_usage:
            await self._send_text(self._answer.usage(status, self._count))
        await self._send_text(END_OF_STREAM, ends=True)

    async def _send_news(self, event: Tokens | ToolEvent) -> None:
        if isinstance(event, ToolCallBegun):
            self._num_calls += 1
        if not isinstance(event, Tokens):
            text = self._answer.call_delta(event, self._num_calls - 1)
        else:
            text = self._answer.delta(event.text) if event.text else None
        if text is not None:
            await self._send_text(text)

    async def _send_start(self) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        self._has_sent = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_text(self, text: str, *, ends: bool = False) -> None:
        if self._has_left:
            return
        try:
            async with asyncio.timeout(self._settings.send_timeout_s):
                await self._send({"type": "http.response.body", "body": text.encode(), "more_body": not ends})
        except (TimeoutError, OSError):
            self._leave()

    def _leave(self) -> None:
        """Interrupts the turn: the client has closed the connection."""
        self._has_left = True
        if self._turn is not None and self._interrupting is None:
            with contextlib.suppress(MicroturnError):  # what befell the session its turn says too
                self._interrupting = self._chat.session.turn(None, max_tokens=0, on_overlap="interrupt")


async def _status_of(turn: AsyncTurn) -> Status:
    """How a turn ends that generates nothing."""
    *_, end = [event async for event in events_of(turn)]
    assert isinstance(end, TurnEnd)
    return end.status


async def _nothing() -> Any:
    return {"type": "http.disconnect"}
