"""The gateway's application with its requests counted and timed, from outside: by what it sends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microturn_gateway.http import REFUSED
from microturn_gateway.metrics import REALTIME, Metrics, endpoint_of

CLIENT_LEFT = 499  # as proxies log who left before the answer
_SWITCHED, _FAILED = 101, 500


class Measured:
    """The application.

    Args:
        app: that answers.
        metrics: that count.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        measured = _Request(scope, self._metrics)

        async def observed(message: Message) -> None:
            measured.sends(message)
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except Exception:
            measured.ends(_FAILED)
            raise
        measured.ends(CLIENT_LEFT)


class _Request:
    """One request, until its first text."""

    def __init__(self, scope: Scope, metrics: Metrics) -> None:
        self._scope = scope
        self._metrics = metrics
        self._endpoint = endpoint_of(scope["path"])
        self._begun_s = time.perf_counter()
        self._is_answered = False
        self._awaits_text = False

    def sends(self, message: Message) -> None:
        """This is being sent."""
        match message["type"]:
            case "http.response.start" | "websocket.http.response.start":
                self._answered(message["status"])
                self._awaits_text = _is_stream(message["headers"])
            case "websocket.accept":
                self._answered(_SWITCHED)
            case "http.response.body" if self._awaits_text:
                self._awaits_text = False
                self._metrics.first_text.labels(self._endpoint).observe(time.perf_counter() - self._begun_s)

    def ends(self, status: int) -> None:
        """Nothing more is sent: without an answer it counts as this one."""
        if not self._is_answered:
            self._answered(status)

    def _answered(self, status: int) -> None:
        self._is_answered = True
        self._metrics.requests.labels(self._endpoint, status).inc()
        if REFUSED in self._scope:
            self._metrics.refusals.labels(self._endpoint, self._scope[REFUSED]).inc()


def measure_event(metrics: Metrics, event: Mapping[str, Any]) -> None:
    """Counts an event that a realtime client is told."""
    if event["type"] == "error":
        metrics.refusals.labels(REALTIME, event["error"]["code"]).inc()
    elif event["type"] == "response.done":
        first_text_ms = event["response"].get("microturn", {}).get("first_text_ms")
        if first_text_ms is not None:
            metrics.first_text.labels(REALTIME).observe(first_text_ms / 1e3)


def _is_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
