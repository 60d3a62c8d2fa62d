"""`microturn gateway`: checks the settings, listens, and serves until it is told to stop."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from microturn_gateway.arguments import add_gateway_arguments, settings_from
from microturn_gateway.settings import GatewaySettings

if TYPE_CHECKING:
    import uvicorn

# Seconds for clients to hear that the gateway goes.
_GRACE_S = 5
# Longer than clients and proxies keep a connection that rests (OpenAI's library 5 s, many load balancers 60 s): when
# both give it up in the same moment, a request is lost on its way.
_KEEP_ALIVE_S = 75


def run_gateway(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C; returns the exit code."""
    try:
        settings = settings_from(arguments)
    except (ValueError, OSError) as error:
        return _say(f"{error}")
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        return _say(f"{error.name} is not installed: pip install 'microturn-client[gateway]'")
    try:
        listener = listen(settings)
    except OSError as error:
        return _say(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}")
    with listener:
        return _serve(settings, listener)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `microturn-gateway`, for machines that have the client package alone."""
    parser = argparse.ArgumentParser(
        prog="microturn-gateway", description="Serve browsers and OpenAI clients.", allow_abbrev=False
    )
    add_gateway_arguments(parser)
    return run_gateway(parser.parse_args(argv))


def listen(settings: GatewaySettings) -> socket.socket:
    """A socket that listens where the settings say.

    Closing a connection waits for what its client has not taken yet, for ever if need be: only the kernel gives it up.

    Raises:
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.create_server((settings.host, settings.port), family=family)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; what connects inherits it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.send_timeout_s * 1e3))
    return listener


def build_server(settings: GatewaySettings) -> uvicorn.Server:
    """The server of a gateway; its `run` takes sockets that listen."""
    import uvicorn

    from microturn_gateway.app import build_app

    config = uvicorn.Config(
        build_app(settings),
        log_level="warning",
        ws="websockets-sansio",
        ws_per_message_deflate=False,  # events are small, and none unpacks to a large one
        ws_max_size=settings.max_message_bytes,
        ws_ping_interval=10.0,  # a client that does not answer within as long again is gone
        ws_ping_timeout=10.0,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    return uvicorn.Server(config)


def _serve(settings: GatewaySettings, listener: socket.socket) -> int:
    from microturn_client import MicroturnError

    try:
        server = build_server(settings)
    except (OSError, MicroturnError) as error:
        return _say(f"no way to the server: {error}")
    for asked_to_stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(asked_to_stop, lambda *_: sys.exit(0))  # uvicorn raises it again when its work is done
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"ready at http://{host}:{listener.getsockname()[1]} for the server at {settings.server}", flush=True)
    server.run(sockets=[listener])
    return 0


def _say(problem: str) -> int:
    print(f"microturn gateway: error: {problem}", file=sys.stderr)
    return 1
