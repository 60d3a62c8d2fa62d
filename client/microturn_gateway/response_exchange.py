"""One request of the Responses API on its session: brings the context to the conversation, answers, and stores."""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Send

from microturn_client import MicroturnError, Tokens, ToolEvent, TurnEnd
from microturn_gateway.exchange import Exchange, Question
from microturn_gateway.failures import Refusal, from_client
from microturn_gateway.response_answer import Event, ResponseAnswer
from microturn_gateway.response_branches import Branch, Branches
from microturn_gateway.response_items import messages_of
from microturn_gateway.response_request import ResponseRequest
from microturn_gateway.response_store import ResponseStore, StoredResponse
from microturn_gateway.sessions import LOST, Model
from microturn_gateway.settings import GatewaySettings


class ResponseExchange:
    """One request.

    Args:
        asked: what is asked for.
        caller: who asks.
        model: that answers.
        branches: to answer on.
        store: where the response is kept.
        settings: of the gateway.
        send: of the ASGI request.
    """

    def __init__(
        self,
        asked: ResponseRequest,
        caller: bytes,
        model: Model,
        branches: Branches,
        store: ResponseStore,
        settings: GatewaySettings,
        send: Send,
    ) -> None:
        self._asked = asked
        self._caller = caller
        self._branches = branches
        self._store = store
        self._send = send
        self._answer = ResponseAnswer(asked, model.name)
        self._items = asked.items
        self._exchange = Exchange(model, settings, send)
        self._stream = self._exchange.stream

    async def run(self, receive: Receive) -> None:
        """Answers.

        Raises:
            Refusal: it was refused, and nothing has been sent yet.
        """
        previous = self._previous()
        source, previous_id = (None, None) if previous is None else (previous.branch, previous.id)
        tools, keeps = self._asked.tools.described, self._asked.is_stored
        try:
            async with (
                self._exchange.watched(receive),
                self._branches.hold(source, previous_id, tools, keeps=keeps) as branch,
            ):
                last = await self._answered_on(branch)
        except MicroturnError as error:
            if not self._stream.has_begun:
                raise from_client(error) from error
            last = self._answer.failed(from_client(error))
        # The session is free by now, for the request that the client sends when it reads this.
        if self._asked.streams:
            await self._stream.tell(last, ends=True)
        else:
            await JSONResponse(self._answer.as_json())({"type": "http"}, _nothing, self._send)

    def _previous(self) -> StoredResponse | None:
        """The response that is gone on from: the one that is named, or that the whole conversation begins with.

        Raises:
            Refusal: there is none of this name.
        """
        previous_id = self._asked.previous_id
        if previous_id is None:
            if not self._asked.is_stored:
                return None
            return self._store.beginning_of(self._asked.items, self._asked.instructions, self._caller)
        previous = self._store.find(previous_id, self._caller)
        if previous is None:
            message = f"there is no response '{previous_id}' here"
            raise Refusal("previous_response_not_found", message, param="previous_response_id", http_status=404)
        self._items = (*previous.items, *self._asked.items)
        return previous

    async def _answered_on(self, branch: Branch) -> list[Event]:
        """Answers and stores; the events that are still to be told."""
        question = Question(
            lambda _: messages_of(self._asked.instructions, self._items),
            self._asked.generation,
            self._asked.max_tokens,
            partial(self._branches.renew, branch),
        )
        try:
            async with aclosing(self._exchange.answer(branch, question)) as events:
                async for event in events:
                    if self._asked.streams and not self._stream.has_begun:
                        await self._stream.begin()
                        await self._stream.tell(self._answer.begin())
                    if isinstance(event, TurnEnd):
                        status = event.status
                    else:
                        await self._tell(event)
        except MicroturnError as error:
            branch.is_lost = isinstance(error, LOST)
            raise
        last = self._answer.end(status, self._exchange.count)
        if self._asked.is_stored:
            conversation = (*self._items, *self._answer.items)
            stored = StoredResponse(self._caller, self._answer.as_json(), conversation, branch)
            await self._store.keep(stored)
        return last

    async def _tell(self, event: Tokens | ToolEvent) -> None:
        news = self._answer.take(event)
        if self._asked.streams:
            await self._stream.tell(news)


async def _nothing() -> Any:
    return {"type": "http.disconnect"}
