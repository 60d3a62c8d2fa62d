"""The WebSockets of the gateway: who may open one, how many there are, and how they end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from starlette.websockets import WebSocket

from microturn_gateway.access import SUBPROTOCOL, Access, caller_of
from microturn_gateway.failures import Refusal
from microturn_gateway.http import refused
from microturn_gateway.places import Places

# Serves a WebSocket: checks who comes, takes a place, and accepts.
Serve = Callable[[WebSocket, AbstractContextManager[None]], Awaitable[None]]

# How the gateway closes a connection; 1012, "going away", is uvicorn's.
CLOSE_IDLE = 1000
CLOSE_REFUSED = 1008
CLOSE_LOST = 1011


class Ending(Exception):
    """A connection ends from this side, with a close code and, for the client, a reason."""

    def __init__(self, close_code: int, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.close_code = close_code
        self.refusal = refusal


class Sockets:
    """The open ones.

    Args:
        access: checks who comes.
        max_open: how many there are at once.
    """

    def __init__(self, access: Access, max_open: int) -> None:
        self._access = access
        self._places = Places(max_open)

    @property
    def num_open(self) -> int:
        """How many there are now."""
        return self._places.num_taken

    def guarded(self, serve: Serve) -> Callable[[WebSocket], Awaitable[None]]:
        """An endpoint whose refusals are answered over HTTP, as long as the WebSocket is not accepted."""

        async def admit(websocket: WebSocket) -> None:
            try:
                self._access.check_place(websocket.headers)
                caller = caller_of(websocket.headers, websocket.scope["subprotocols"])
                await serve(websocket, self._places.take(caller))
            except Refusal as refusal:
                await websocket.send_denial_response(refused(refusal))

        return admit


async def accept(websocket: WebSocket) -> None:
    """Accepts one, and of what it offers the protocol that browsers bring a key with."""
    await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None)
