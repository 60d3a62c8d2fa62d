"""One request of the Responses API on its session: brings the context to the conversation, answers, and stores."""

from __future__ import annotations

from collections.abc import Sequence

from microturn_client import MicroturnError, TurnEnd
from microturn_gateway.exchange import Exchange, Question
from microturn_gateway.failures import Refusal, of_request
from microturn_gateway.response_answer import ResponseAnswer
from microturn_gateway.response_items import (
    ConversationItem,
    Reference,
    check_results,
    gone_on,
    messages_of,
    output_item,
)
from microturn_gateway.response_memory import CallerMemory
from microturn_gateway.response_request import ResponseRequest
from microturn_gateway.response_store import StoredResponse
from microturn_gateway.transport import Transport


class ResponseExchange:
    """One request.

    Args:
        asked: what is asked for.
        answer: to it, new.
        exchange: of the request.
        memory: of what can be gone on from.
        transport: to the client.
    """

    def __init__(
        self,
        asked: ResponseRequest,
        answer: ResponseAnswer,
        exchange: Exchange,
        memory: CallerMemory,
        transport: Transport,
    ) -> None:
        self._asked = asked
        self._answer = answer
        self._exchange = exchange
        self._memory = memory
        self._transport = transport

    async def run(self) -> None:
        """Answers.

        Raises:
            Refusal: it was refused, and nothing has been sent yet.
        """
        asked = self._asked
        items = gone_on(self._earlier_items(), self._given_items())
        check_results(items)
        conversation = messages_of(asked.instructions, items)
        if asked.generates and not conversation:
            raise Refusal("invalid_value", "'input' must have text", param="input")
        question = Question(
            conversation,
            asked.tools,
            asked.generation,
            asked.max_tokens if asked.generates else 0,
            keeps=self._memory.keeps(asked),
        )
        try:
            async with self._exchange.answer(question) as events:
                async for event in events:
                    await self._begin()
                    if isinstance(event, TurnEnd):
                        status = event.status
                    else:
                        await self._transport.tell(self._answer.take(event))
        except MicroturnError as error:
            if not self._transport.has_begun:
                raise of_request(error) from error
            last = self._answer.failed(of_request(error))
        else:
            last = self._answer.end(status, self._exchange.count)
            shown = self._answer.as_json()
            self._memory.keep(StoredResponse(self._memory.caller, shown, (*items, *self._answer.items)))
        # The session is free by now, for the request that the client sends when it reads this.
        await self._transport.tell(last)
        await self._transport.end()

    def _earlier_items(self) -> Sequence[ConversationItem]:
        """What the response that is gone on from ended with.

        Raises:
            Refusal: there is none of this name.
        """
        previous_id = self._asked.previous_id
        if previous_id is None:
            return ()
        previous = self._memory.find(previous_id)
        if previous is None:
            message = f"there is no response '{previous_id}' here"
            raise Refusal("previous_response_not_found", message, param="previous_response_id", http_status=404)
        return previous.items

    def _given_items(self) -> Sequence[ConversationItem]:
        """The request's items, with what it refers to.

        Raises:
            Refusal: there is no such item.
        """
        given: list[ConversationItem] = []
        for item in self._asked.items:
            if not isinstance(item, Reference):
                given.append(item)
                continue
            response = self._memory.find_with(item.item_id)
            if response is None:
                message = f"there is no item '{item.item_id}' here: send the items themselves, as with 'store': false"
                raise Refusal("item_not_found", message, param=item.path, http_status=404)
            found = next(output_item(shown) for shown in response.output if shown["id"] == item.item_id)
            given += [] if found is None else [found]
        return given

    async def _begin(self) -> None:
        if not self._transport.has_begun:
            await self._transport.begin()
            await self._transport.tell(self._answer.begin())
