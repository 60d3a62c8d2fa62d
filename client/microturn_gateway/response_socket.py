"""`/v1/responses` over a WebSocket: the client asks for one response after another, and is told of each in events.

reader   client's events ─► queue; a client that leaves interrupts the response that is being made
server   queue ─► a response ─► its events ─► client
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocket, WebSocketDisconnect

from microturn_gateway.failures import Refusal
from microturn_gateway.fields import parse_object
from microturn_gateway.response_memory import ConnectionMemory
from microturn_gateway.response_request import ResponseRequest, parse_response_request
from microturn_gateway.settings import GatewaySettings
from microturn_gateway.sockets import CLOSE_IDLE, CLOSE_REFUSED, Ending
from microturn_gateway.transport import Transport

_CREATE = "response.create"
_MAX_WAITING = 16
_MAX_AGE_S = 3600.0  # as the Open Responses specification has it
_LAST_WORDS_S = 1.0

Respond = Callable[[ResponseRequest, Transport], Awaitable[None]]


class ResponseSocket:
    """Serves one accepted WebSocket.

    Args:
        websocket: accepted.
        respond: answers a request.
        memory: of the connection.
        settings: the gateway's.

    Attributes:
        has_ended: the client has left, or has to.
    """

    def __init__(
        self, websocket: WebSocket, respond: Respond, memory: ConnectionMemory, settings: GatewaySettings
    ) -> None:
        self.has_ended = asyncio.Event()
        self._websocket = websocket
        self._respond = respond
        self._memory = memory
        self._settings = settings
        self._waiting: asyncio.Queue[str | bytes | None] = asyncio.Queue()  # None: it has ended
        self._ending: Ending | None = None

    async def serve(self) -> None:
        """Returns when the client has left or had to."""
        ends_at_s = asyncio.get_running_loop().time() + _MAX_AGE_S
        reading = asyncio.create_task(self._read())
        try:
            while (message := await self._next(ends_at_s)) is not None:
                await self._answer(message)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if self._ending is not None:
            await self._say_goodbye(self._ending)

    async def send(self, event: Mapping[str, Any]) -> None:
        """Sends an event, unless the connection has ended; a client that does not take it ends it."""
        if self.has_ended.is_set():
            return
        try:
            async with asyncio.timeout(self._settings.send_timeout_s):
                await self._websocket.send_text(json.dumps(event, ensure_ascii=False))
        except TimeoutError:
            self._end(Ending(CLOSE_REFUSED, Refusal("slow_reader", "events are not read")))
        except WebSocketDisconnect:
            self._end()

    async def _read(self) -> None:
        """Listens while responses are made, to notice when the client leaves."""
        while (message := await self._websocket.receive())["type"] != "websocket.disconnect":
            if self._waiting.qsize() == _MAX_WAITING:
                refusal = Refusal("too_many_events", f"{_MAX_WAITING} events wait already", http_status=429)
                self._end(Ending(CLOSE_REFUSED, refusal))
                return
            self._waiting.put_nowait(message.get("text") or message.get("bytes") or "")
        self._end()

    def _end(self, ending: Ending | None = None) -> None:
        if not self.has_ended.is_set():
            self._ending = ending
            self.has_ended.set()
            self._waiting.put_nowait(None)

    async def _next(self, ends_at_s: float) -> str | bytes | None:
        """The client's next event; None when there are no more."""
        idle_s = self._settings.idle_timeout_s
        left_s = ends_at_s - asyncio.get_running_loop().time()
        try:
            if left_s <= 0:
                raise TimeoutError  # whatever waits
            async with asyncio.timeout(min(idle_s, left_s)):
                message = await self._waiting.get()
        except TimeoutError:
            if left_s <= idle_s:
                refusal = Refusal("websocket_connection_limit_reached", f"connections last {_MAX_AGE_S:g} s")
            else:
                refusal = Refusal("session_idle", f"nothing came for {idle_s:g} s")
            self._end(Ending(CLOSE_IDLE, refusal))
        return None if self.has_ended.is_set() else message

    async def _answer(self, message: str | bytes) -> None:
        """Answers an event of the client; one that fails cannot be tried again from the same unstored response."""
        latest = self._memory.latest
        previous_id = None
        try:
            event = dict(parse_object(message))
            previous_id = event.get("previous_response_id")
            if event.pop("type", None) != _CREATE:
                raise Refusal("unknown_event", f"the events of this connection are '{_CREATE}'", param="type")
            await self._respond(parse_response_request(event), _Told(self))
        except Refusal as refusal:
            await self.send(_error(refusal))
        except ClientDisconnect:
            return
        if self._memory.latest is latest:
            self._memory.forget(previous_id)

    async def _say_goodbye(self, ending: Ending) -> None:
        with contextlib.suppress(TimeoutError, WebSocketDisconnect, RuntimeError):
            async with asyncio.timeout(_LAST_WORDS_S):
                if ending.refusal.code != "slow_reader":
                    await self._websocket.send_text(json.dumps(_error(ending.refusal), ensure_ascii=False))
                await self._websocket.close(ending.close_code, ending.refusal.code)


class _Told:
    """The transport of one response on a connection."""

    def __init__(self, socket: ResponseSocket) -> None:
        self.has_begun = False
        self._socket = socket

    @property
    def is_broken(self) -> bool:
        return self._socket.has_ended.is_set()

    async def left(self) -> None:
        await self._socket.has_ended.wait()

    async def begin(self) -> None:
        self.has_begun = True

    async def tell(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            await self._socket.send(event)

    async def end(self) -> None:
        """The last event says it."""


def _error(refusal: Refusal) -> dict[str, Any]:
    return {"type": "error", "status": refusal.http_status, "error": refusal.as_json()}
