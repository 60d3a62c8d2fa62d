"""`/v1/responses`: a request brings what is new in a conversation, and names the response that it goes on from.

An ASGI application of its own, since it listens for the client's leaving while it answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from microturn_gateway.access import Access, caller_of
from microturn_gateway.branches import Branches
from microturn_gateway.caller import hint_of
from microturn_gateway.event_stream import EventStream, JsonBody
from microturn_gateway.exchange import Exchange
from microturn_gateway.failures import Refusal
from microturn_gateway.http import read_body, serve
from microturn_gateway.response_answer import ResponseAnswer
from microturn_gateway.response_exchange import ResponseExchange
from microturn_gateway.response_memory import CallerMemory, ConnectionMemory
from microturn_gateway.response_request import ResponseRequest, parse_response_request
from microturn_gateway.response_socket import ResponseSocket
from microturn_gateway.response_store import ResponseStore
from microturn_gateway.sessions import Sessions
from microturn_gateway.settings import GatewaySettings
from microturn_gateway.sockets import accept
from microturn_gateway.transport import Transport


class Responses:
    """The endpoints."""

    def __init__(self, access: Access, sessions: Sessions, branches: Branches, settings: GatewaySettings) -> None:
        self._access = access
        self._sessions = sessions
        self._settings = settings
        self._branches = branches
        self._store = ResponseStore(settings.max_sessions, settings.idle_timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        await serve(self._access, self._answer, scope, receive, send)

    async def _answer(self, request: Request, send: Send) -> None:
        asked = parse_response_request(await read_body(request, self._settings.max_body_bytes))
        memory = CallerMemory(self._store, caller_of(request.headers))
        receive, timeout_s = request.receive, self._settings.send_timeout_s
        transport = EventStream(receive, send, timeout_s) if asked.streams else JsonBody(receive, send)
        await self._respond(memory, request.headers, asked, transport)

    async def serve(self, websocket: WebSocket, place: AbstractContextManager[None]) -> None:
        """Answers the requests of one WebSocket, which takes a place.

        Raises:
            Refusal: it may not be opened.
        """
        offered = websocket.scope["subprotocols"]
        self._access.check_token(websocket.headers, offered)
        memory = ConnectionMemory(self._store, caller_of(websocket.headers, offered))
        with place:
            await accept(websocket)
            try:
                respond = partial(self._respond, memory, websocket.headers)
                await ResponseSocket(websocket, respond, memory, self._settings).serve()
            finally:
                await self._branches.close_all(memory.key)

    async def _respond(
        self, memory: CallerMemory, headers: Mapping[str, str], asked: ResponseRequest, transport: Transport
    ) -> None:
        model = await self._sessions.model(asked.model)
        caller = replace(memory.owner(asked), hint=hint_of(headers, asked.shown["prompt_cache_key"]))
        exchange = Exchange(self._branches, caller, self._settings, transport)
        await ResponseExchange(asked, ResponseAnswer(asked, model.name), exchange, memory, transport).run()

    async def reap(self) -> None:
        """Gives up unused responses, for as long as the gateway runs."""
        await self._store.reap()

    async def retrieve(self, request: Request) -> Response:
        """A stored response."""
        if request.query_params.get("stream", "false") != "false":
            raise Refusal("unsupported_parameter", "a stored response does not stream", param="stream")
        stored = self._store.get(request.path_params["response_id"], caller_of(request.headers))
        return JSONResponse(stored.shown)

    async def delete(self, request: Request) -> Response:
        """Gives up a stored response."""
        response_id = request.path_params["response_id"]
        caller = caller_of(request.headers)
        self._store.get(response_id, caller)
        self._store.forget(response_id, caller)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})
