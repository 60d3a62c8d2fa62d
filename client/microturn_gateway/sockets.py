"""The WebSockets of the gateway: who may open one, how many there are, and how they end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from starlette.websockets import WebSocket

from microturn_gateway.access import SUBPROTOCOL, Access
from microturn_gateway.failures import Refusal
from microturn_gateway.http import refused

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

    Attributes:
        num_open: how many there are.

    Args:
        access: checks who comes.
        max_open: how many there are at once.
    """

    def __init__(self, access: Access, max_open: int) -> None:
        self._access = access
        self._max_open = max_open
        self.num_open = 0

    def guarded(self, serve: Serve) -> Callable[[WebSocket], Awaitable[None]]:
        """An endpoint whose refusals are answered over HTTP, as long as the WebSocket is not accepted."""

        async def admit(websocket: WebSocket) -> None:
            try:
                self._access.check_place(websocket.headers)
                await serve(websocket, self._place())
            except Refusal as refusal:
                await websocket.send_denial_response(refused(refusal))

        return admit

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self.num_open >= self._max_open:
            raise Refusal("too_many_sessions", "all places are taken: try again later", http_status=429)
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


async def accept(websocket: WebSocket) -> None:
    """Accepts one, and of what it offers the protocol that browsers bring a key with."""
    await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None)
