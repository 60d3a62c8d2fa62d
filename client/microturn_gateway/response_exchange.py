"""One request of the Responses API on its session: brings the context to the conversation, answers, and stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Send

from microturn_client import MicroturnError, Tokens, ToolEvent, TurnEnd
from microturn_gateway.exchange import Exchange, Question
from microturn_gateway.failures import Refusal, from_client
from microturn_gateway.response_answer import ResponseAnswer
from microturn_gateway.response_items import ConversationItem, check_results, messages_of
from microturn_gateway.response_request import ResponseRequest
from microturn_gateway.response_store import ResponseStore, StoredResponse
from microturn_gateway.sessions import Model


class ResponseExchange:
    """One request.

    Args:
        asked: what is asked for.
        caller: who asks.
        model: that answers.
        exchange: of the request.
        store: where the response is kept.
        send: of the ASGI request.
    """

    def __init__(
        self,
        asked: ResponseRequest,
        caller: bytes,
        model: Model,
        exchange: Exchange,
        store: ResponseStore,
        send: Send,
    ) -> None:
        self._asked = asked
        self._caller = caller
        self._store = store
        self._send = send
        self._answer = ResponseAnswer(asked, model.name)
        self._exchange = exchange
        self._stream = exchange.stream

    async def run(self, receive: Receive) -> None:
        """Answers.

        Raises:
            Refusal: it was refused, and nothing has been sent yet.
        """
        asked = self._asked
        items = (*self._earlier_items(), *asked.items)
        check_results(items)
        question = Question(
            messages_of(asked.instructions, items),
            asked.tools.described,
            asked.generation,
            asked.max_tokens,
            keeps=asked.is_stored,
        )
        try:
            async with self._exchange.answer(question, receive) as events:
                async for event in events:
                    await self._begin()
                    if isinstance(event, TurnEnd):
                        status = event.status
                    else:
                        await self._tell(event)
        except MicroturnError as error:
            if not self._stream.has_begun:
                raise from_client(error) from error
            last = self._answer.failed(from_client(error))
        else:
            last = self._answer.end(status, self._exchange.count)
            if asked.is_stored:
                self._store.keep(StoredResponse(self._caller, self._answer.as_json(), (*items, *self._answer.items)))
        # The session is free by now, for the request that the client sends when it reads this.
        if asked.streams:
            await self._stream.tell(last)
            await self._stream.end()
        else:
            await JSONResponse(self._answer.as_json())({"type": "http"}, _nothing, self._send)

    def _earlier_items(self) -> Sequence[ConversationItem]:
        """What the response that is gone on from ended with.

        Raises:
            Refusal: there is none of this name.
        """
        previous_id = self._asked.previous_id
        if previous_id is None:
            return ()
        previous = self._store.find(previous_id, self._caller)
        if previous is None:
            message = f"there is no response '{previous_id}' here"
            raise Refusal("previous_response_not_found", message, param="previous_response_id", http_status=404)
        return previous.items

    async def _begin(self) -> None:
        if self._asked.streams and not self._stream.has_begun:
            await self._stream.begin()
            await self._stream.tell(self._answer.begin())

    async def _tell(self, event: Tokens | ToolEvent) -> None:
        news = self._answer.take(event)
        if self._asked.streams:
            await self._stream.tell(news)


async def _nothing() -> Any:
    return {"type": "http.disconnect"}
