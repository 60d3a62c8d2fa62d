"""One request of the Responses API on its session: brings the context to the conversation, answers, and stores."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Send

from microturn_client import AsyncTurn, MicroturnError, Status, Tokens, ToolEvent, TurnEnd
from microturn_gateway.answer import GeneratedText, PromptCount
from microturn_gateway.event_stream import EventStream
from microturn_gateway.failures import Refusal, from_client
from microturn_gateway.options import room_for_answer
from microturn_gateway.response_answer import Event, ResponseAnswer
from microturn_gateway.response_branches import Branch, Branches
from microturn_gateway.response_items import messages_of
from microturn_gateway.response_request import ResponseRequest
from microturn_gateway.response_store import ResponseStore, StoredResponse
from microturn_gateway.sessions import LOST, Model, events_of
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
        self._model = model
        self._branches = branches
        self._store = store
        self._settings = settings
        self._send = send
        self._stream = EventStream(send, settings.send_timeout_s)
        self._answer = ResponseAnswer(asked, model.name)
        self._items = asked.items
        self._generated = GeneratedText()
        self._count = PromptCount(0)
        self._branch: Branch | None = None
        self._turn: AsyncTurn | None = None
        self._interrupting: AsyncTurn | None = None
        self._has_left = False

    async def watch(self, receive: Receive) -> None:
        """Waits for the client to leave."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()

    async def run(self) -> None:
        """Answers.

        Raises:
            Refusal: it was refused, and nothing has been sent yet.
        """
        previous = self._previous()
        source, previous_id = (None, None) if previous is None else (previous.branch, previous.id)
        tools, keeps = self._asked.tools.described, self._asked.is_stored
        try:
            async with self._branches.hold(source, previous_id, tools, keeps=keeps) as branch:
                self._branch = branch
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
        try:
            status = await self._generate(branch)
            if self._interrupting is not None:
                await self._interrupting.wait()
        except MicroturnError as error:
            branch.is_lost = isinstance(error, LOST)
            raise
        last = self._answer.end(status, self._count)
        if self._asked.is_stored:
            conversation = (*self._items, *self._answer.items)
            stored = StoredResponse(self._caller, self._answer.as_json(), conversation, branch)
            await self._store.keep(stored)
        return last

    async def _generate(self, branch: Branch) -> Status:
        try:
            events = await self._ask(branch)
            event = await anext(events)
        except LOST:
            await self._branches.renew(branch)
            events = await self._ask(branch)
            event = await anext(events)
        if self._asked.streams:
            await self._stream.begin()
            await self._stream.tell(self._answer.begin())
        while not isinstance(event, TurnEnd):
            self._generated.take(event)
            news = self._answer.take(event)
            if self._asked.streams:
                await self._stream.tell(news)
                if self._stream.is_broken:
                    self._leave()
            event = await anext(events)
        self._turn = None  # there is nothing left to interrupt
        self._count.take(event.status)
        branch.context.answer(self._generated.piece(event.status), event.status.context_len)
        return event.status

    async def _ask(self, branch: Branch) -> AsyncIterator[Tokens | ToolEvent | TurnEnd]:
        """Begins the answer, behind what of the conversation the session does not hold yet."""
        target = messages_of(self._asked.instructions, self._items)
        held_len = branch.context.context_len
        missing = branch.context.become(target)
        if missing is None:
            await self._branches.renew(branch)
            missing = branch.context.become(target) or []
        context = branch.context
        self._count = PromptCount(min(held_len, context.end))
        for message in missing:
            turn = branch.session.turn(message.content, role=message.role, max_tokens=0, **_rewinding(branch))
            status = await _status_of(turn)
            context.append(message, status.context_len)
            self._count.take(status)
        most = self._asked.max_tokens
        if most is None:
            most = room_for_answer(context.end, self._model.max_context, self._settings.max_answer_tokens)
        options: dict[str, Any] = {**self._asked.generation, **_rewinding(branch), "max_tokens": most}
        self._turn = branch.session.turn(None, role="assistant", **options)
        if self._has_left:
            self._leave()
        return events_of(self._turn)

    def _leave(self) -> None:
        """Interrupts the turn: the client has closed the connection."""
        self._has_left = self._stream.is_broken = True
        if self._turn is not None and self._branch is not None and self._interrupting is None:
            with contextlib.suppress(MicroturnError):  # what befell the session its turn says too
                self._interrupting = self._branch.session.turn(None, max_tokens=0, on_overlap="interrupt")


def _rewinding(branch: Branch) -> dict[str, Any]:
    rewind_to = branch.context.rewind_to
    return {} if rewind_to is None else {"rewind_to": rewind_to}


async def _status_of(turn: AsyncTurn) -> Status:
    """How a turn ends that generates nothing."""
    *_, end = [event async for event in events_of(turn)]
    assert isinstance(end, TurnEnd)
    return end.status


async def _nothing() -> Any:
    return {"type": "http.disconnect"}
