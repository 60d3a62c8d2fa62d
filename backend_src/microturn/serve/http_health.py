"""Health over HTTP on a port of its own, for load balancers that place sessions.

gRPC's health protocol knows two answers, and a full server needs a third: its sessions stay, and new ones go elsewhere
as long as another has room. Envoy understands that of an answer over HTTP, by the header ``x-envoy-degraded``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from microturn.serve.errors import ServeError
from microturn.serve.health import Health

_IDLE_TIMEOUT_S = 30.0


class HttpHealth:
    """Answers every GET with 200 (OPEN), 200 and ``x-envoy-degraded`` (FULL) or 503 (DOWN); the body says it in words.

    Args:
        host: address to listen on.
        port: to listen on.
        health: asked at every request, from any thread.

    Raises:
        ServeError: the port is in use.
    """

    def __init__(self, host: str, port: int, health: Callable[[], Health]) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ServeError(f"cannot listen on {host}:{port} (--http-health-port)") from error
        self._server.health = health
        self._thread = threading.Thread(target=self._server.serve_forever, name="http-health", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a balancer keeps its connection
    health: Callable[[], Health]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection of each balancer
    timeout = _IDLE_TIMEOUT_S
    server: _Server

    def do_GET(self) -> None:
        health = self.server.health()
        body = f"{health.value}\n".encode()
        self.send_response(HTTPStatus.SERVICE_UNAVAILABLE if health is Health.DOWN else HTTPStatus.OK)
        if health is Health.FULL:
            self.send_header("x-envoy-degraded", "true")
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it is asked every second."""
