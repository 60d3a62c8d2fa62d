"""`/v1/chat/completions`: a request brings the whole conversation, and its session computes what is new in it.

An ASGI application of its own, since it listens for the client's leaving while it answers: closing the connection
interrupts, so that what was said until then stays in the context and nothing more is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from microturn_client import MicroturnError, Status, Tokens, ToolCallBegun, ToolEvent, TurnEnd
from microturn_gateway.access import Access, caller_of
from microturn_gateway.branches import Branches
from microturn_gateway.caller import Caller, hint_of
from microturn_gateway.chat_answer import ChatAnswer
from microturn_gateway.chat_request import ChatRequest, parse_chat_request
from microturn_gateway.event_stream import EventStream
from microturn_gateway.exchange import Exchange, Question
from microturn_gateway.failures import of_request
from microturn_gateway.http import read_body, serve
from microturn_gateway.logprobs import Logprob
from microturn_gateway.sessions import Model, Sessions
from microturn_gateway.settings import GatewaySettings


class Completions:
    """The endpoint."""

    def __init__(self, access: Access, sessions: Sessions, branches: Branches, settings: GatewaySettings) -> None:
        self._access = access
        self._sessions = sessions
        self._branches = branches
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await serve(self._access, self._answer, scope, receive, send)

    async def _answer(self, request: Request, send: Send) -> None:
        body = await read_body(request, self._settings.max_body_bytes)
        asked = parse_chat_request(body)
        model = await self._sessions.model(asked.model)
        stream = EventStream(request.receive, send, self._settings.send_timeout_s)
        hint = hint_of(request.headers, body.get("prompt_cache_key"))
        caller = Caller(caller_of(request.headers), hint=hint)
        exchange = Exchange(self._branches, caller, self._settings, stream)
        await _ChatExchange(asked, model, exchange, stream).run()


class _ChatExchange:
    """One request."""

    def __init__(self, asked: ChatRequest, model: Model, exchange: Exchange, stream: EventStream) -> None:
        self._asked = asked
        self._answer = ChatAnswer(model.name, has_logprobs="logprobs" in asked.generation)
        self._exchange = exchange
        self._stream = stream
        self._num_calls = 0

    async def run(self) -> None:
        """Answers.

        Raises:
            Refusal: it was refused, and nothing has been sent yet.
        """
        asked = self._asked
        question = Question(asked.messages, asked.tools, asked.generation, asked.max_tokens)
        try:
            async with self._exchange.answer(question) as events:
                async for event in events:
                    if isinstance(event, TurnEnd):
                        status = event.status
                    else:
                        await self._tell(event, self._answer.take(event))
        except MicroturnError as error:
            if not self._stream.has_begun:
                raise of_request(error) from error
            await self._stream.write(self._answer.error(of_request(error).as_json()))
            await self._stream.end()
            return
        # The session is free by now, for the request that the client sends when it reads this.
        await self._end(status)

    async def _tell(self, event: Tokens | ToolEvent, logprobs: Sequence[Logprob]) -> None:
        if not self._asked.streams:
            return
        await self._begin()
        if isinstance(event, ToolCallBegun):
            self._num_calls += 1
        if not isinstance(event, Tokens):
            text = self._answer.call_delta(event, self._num_calls - 1)
        else:
            text = self._answer.delta(event.text, logprobs) if event.text else None
        if text is not None:
            await self._stream.write(text)

    async def _begin(self) -> None:
        if not self._stream.has_begun:
            await self._stream.begin()
            await self._stream.write(self._answer.begin())

    async def _end(self, status: Status) -> None:
        generated, count = self._exchange.generated, self._exchange.count
        if not self._asked.streams:
            await self._stream.whole(self._answer.whole(generated.text, generated.calls, status, count))
            return
        await self._begin()
        await self._stream.write(self._answer.end(status, has_called=bool(generated.calls)))
        if self._asked.includes_usage:
            await self._stream.write(self._answer.usage(status, count))
        await self._stream.end()
