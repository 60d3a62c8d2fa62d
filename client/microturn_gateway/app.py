"""The gateway as an ASGI application: its routes, access control, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope
from starlette.websockets import WebSocket

from microturn_client import AsyncClient, AsyncSession
from microturn_gateway.access import Access
from microturn_gateway.branches import Branches
from microturn_gateway.client_events import AnswerOptions, UpdateSession, parse_session
from microturn_gateway.client_secrets import ClientSecrets, signing_key
from microturn_gateway.completions import Completions
from microturn_gateway.conversation import new_id
from microturn_gateway.cors import Cors
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields
from microturn_gateway.http import ERROR_HANDLERS, read_body, refused
from microturn_gateway.measured import CLIENT_LEFT, Measured
from microturn_gateway.metrics import Metrics
from microturn_gateway.realtime import Realtime
from microturn_gateway.realtime_tools import described
from microturn_gateway.responses import Responses
from microturn_gateway.session_config import SessionConfig
from microturn_gateway.sessions import Model, Sessions
from microturn_gateway.settings import GatewaySettings
from microturn_gateway.sockets import Sockets, accept
from microturn_gateway.websocket import RealtimeSocket

_PAGE_DIR = Path(__file__).parent / "page"
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_LEAST_SECRET_S, _USUAL_SECRET_S, _MOST_SECRET_S = 10, 600, 7200
_AS_EVER = UpdateSession(None, AnswerOptions(None, {}))

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(settings: GatewaySettings) -> Starlette:
    """The application; it speaks to the server from its start to its end."""
    client = AsyncClient(settings.server, **settings.server_access.client_options())
    sessions = Sessions(client, settings.served_model_names)
    branches = Branches(sessions, settings.max_sessions, settings.idle_timeout_s)
    client_secrets = ClientSecrets(signing_key(settings.secret_key or settings.token), time.time)
    access = Access(settings.token, settings.allowed_origins, client_secrets, settings.metrics_token)
    sockets = Sockets(access, settings.max_sessions)
    num_sessions = {"socket": lambda: sockets.num_open, "kept": lambda: branches.num_open}
    metrics = Metrics(num_sessions, settings.max_sessions)
    gateway = _Gateway(settings, sessions, client_secrets, access, metrics)
    responses = Responses(access, sessions, branches, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        reaping = [asyncio.create_task(branches.reap()), asyncio.create_task(responses.reap())]
        try:
            yield
        finally:
            for task in reaping:
                task.cancel()
            await client.close()

    endpoints = [
        WebSocketRoute("/realtime", sockets.guarded(gateway.realtime)),
        WebSocketRoute("/responses", sockets.guarded(responses.serve)),
        WebSocketRoute("/{path:path}", gateway.no_session),
        Route("/realtime", gateway.no_socket, methods=["GET"]),
        Route("/realtime/client_secrets", gateway.guarded(gateway.create_secret), methods=["POST"]),
        Route("/models", gateway.guarded(gateway.models), methods=["GET"]),
        Route("/models/{model:path}", gateway.guarded(gateway.model), methods=["GET"]),
        Route("/chat/completions", Completions(access, sessions, branches, settings), methods=["POST"]),
        Route("/responses", responses, methods=["POST"]),
        Route("/responses/{response_id}", gateway.guarded(responses.retrieve), methods=["GET"]),
        Route("/responses/{response_id}", gateway.guarded(responses.delete), methods=["DELETE"]),
    ]
    # An application of its own, so that whatever is wrong with a request to it is said in OpenAI's shape.
    api: ASGIApp = Starlette(routes=endpoints, exception_handlers=ERROR_HANDLERS)
    if settings.allowed_origins:
        api = Cors(api, settings.allowed_origins)
    routes = [
        Mount("/v1", api),
        Route("/v1", api),  # of which the mount takes only what is below it
        Route("/health", gateway.health, methods=["GET"]),
        Route("/metrics", gateway.guarded(gateway.scrape, access.check_metrics), methods=["GET"]),
        Mount("/", _Page(directory=_PAGE_DIR, html=True)),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Measured, metrics=metrics)],
        exception_handlers=ERROR_HANDLERS,
    )


class _Page(StaticFiles):
    """The page, with headers that keep it to itself."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file of it."""
        response = await super().get_response(path, scope)
        response.headers.update(_PAGE_HEADERS)
        return response


class _Gateway:
    """The endpoints but for chat completions and responses."""

    def __init__(
        self,
        settings: GatewaySettings,
        sessions: Sessions,
        client_secrets: ClientSecrets,
        access: Access,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._client_secrets = client_secrets
        self._access = access
        self._metrics = metrics

    def guarded(self, endpoint: Endpoint, check: Callable[[Mapping[str, str]], None] | None = None) -> Endpoint:
        """An endpoint behind a check, that of the token unless another is given; refusals become responses."""
        check = check or self._access.check_token

        async def answer(request: Request) -> Response:
            try:
                self._access.check_place(request.headers)
                check(request.headers)
                return await endpoint(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            except Refusal as refusal:
                return refused(refusal)

        return answer

    async def health(self, _request: Request) -> Response:
        """Whether requests can be answered now; anybody may ask, since probes have no token."""
        if await self._sessions.are_possible():
            return JSONResponse({"status": "ok"})
        return refused(Refusal("unavailable", "the server behind this gateway is not ready", http_status=503))

    async def scrape(self, _request: Request) -> Response:
        """The metrics."""
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def models(self, _request: Request) -> Response:
        """The one model, under each of its names, in OpenAI's list."""
        models = await self._sessions.models()
        return JSONResponse({"object": "list", "data": [model.as_json() for model in models]})

    async def model(self, request: Request) -> Response:
        """The model under one of its names."""
        name = request.path_params["model"]
        if not name:
            raise HTTPException(404)
        return JSONResponse((await self._sessions.model(name)).as_json())

    async def create_secret(self, request: Request) -> Response:
        """A secret for a browser."""
        fields = Fields(await read_body(request, self._settings.max_body_bytes))
        wanted = fields.take("session", dict, {})
        model = await self._sessions.model()
        config = self._config(new_id("sess"), model)
        session = config.possible(parse_session(wanted), has_begun=False, is_beginning_fixed=False)
        if session.refused:  # nothing is lost that way: the request is answered, and can be sent again without it
            raise Refusal.of_parts(session.refused)
        expiry = Fields(fields.take("expires_after", dict, {}), "expires_after")
        expiry.ignore("anchor")
        lifetime_s = expiry.take_int("seconds", _LEAST_SECRET_S, _MOST_SECRET_S, _USUAL_SECRET_S)
        expiry.end()
        fields.end()
        secret = self._client_secrets.create(lifetime_s, wanted)
        told = {"value": secret.value, "expires_at": secret.expires_at_s, "session": config.updated(session).as_json()}
        return JSONResponse(told, headers={"cache-control": "no-store"})

    async def no_session(self, websocket: WebSocket) -> None:
        """A WebSocket to where there is none."""
        refusal = Refusal("unknown_url", f"there is no WebSocket at {websocket.url.path} here", http_status=404)
        await websocket.send_denial_response(refused(refusal))

    async def no_socket(self, _request: Request) -> Response:
        """A request to where there is a WebSocket."""
        refusal = Refusal("websocket_required", "this is a WebSocket: connect to it with an upgrade", http_status=426)
        response = refused(refusal)
        response.headers.update({"upgrade": "websocket", "connection": "upgrade"})
        return response

    async def realtime(self, websocket: WebSocket, place: AbstractContextManager[None]) -> None:
        """One session, which takes a place.

        Raises:
            Refusal: it may not be opened.
        """
        asked = self._access.check_realtime(websocket.headers, websocket.scope["subprotocols"])
        with place:
            model = await self._sessions.model(websocket.query_params.get("model"))
            await accept(websocket)
            config = self._config(new_id("sess"), model)
            config = config.updated(config.possible(asked or _AS_EVER, has_begun=False, is_beginning_fixed=False))
            realtime = Realtime(
                config,
                max_answer_tokens=self._settings.max_answer_tokens,
                beat_s=self._settings.beat_ms / 1e3,
            )

            ids = iter((config.id,))  # a later session has an id of its own: the end of this one may be under way

            def open_session() -> AsyncSession:
                window = realtime.talk.window
                options = {} if window is None else window.as_json()
                return self._sessions.open(next(ids, None), described(realtime.talk.tools), options)

            await RealtimeSocket(websocket, realtime, open_session, self._settings, self._metrics).serve()

    def _config(self, session_id: str, model: Model) -> SessionConfig:
        beat_ms, max_context = self._settings.beat_ms, model.max_context
        return SessionConfig(session_id, model.name, model.names, beat_ms=beat_ms, max_context=max_context)
