"""The gRPC health service (grpc.health.v1) on its own port, for the kubelet and for people.

Triton keeps reporting ready when the model process is dead; this service reports what the health turns found. A full
server is healthy; whether it opens new sessions is the service ``new-sessions``. `http_health` says the same to load
balancers.
"""

from __future__ import annotations

import argparse
import enum
from concurrent import futures
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from microturn.hosts.kserve.envelope import MODEL_NAME
from microturn.serve import console
from microturn.serve.errors import ServeError

_SERVICES = ("", MODEL_NAME)
NEW_SESSIONS = "new-sessions"


class Health(enum.Enum):
    """What a server can do for its clients."""

    OPEN = "turns are answered, and sessions opened"
    FULL = "turns are answered; a new session would be refused"
    DOWN = "no turn is answered, or the server drains"


class HealthService:
    """Answers NOT_SERVING until `set_health`.

    Args:
        address: ``host:port`` to listen on.

    Raises:
        ServeError: the port is in use.
    """

    def __init__(self, address: str) -> None:
        self._servicer = health.HealthServicer()
        self._statuses: dict[str, bool] = {}
        self._health = Health.DOWN
        self._is_draining = False
        self.set_health(Health.DOWN)
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=4), options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        try:
            self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ServeError(f"cannot listen on {address} (--health-port)") from error

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()

    @property
    def health(self) -> Health:
        """What is answered now."""
        return Health.DOWN if self._is_draining else self._health

    def set_health(self, health: Health) -> None:
        """Sets the answers."""
        self._health = health
        for service in _SERVICES:
            self._set(service, health is not Health.DOWN)
        self._set(NEW_SESSIONS, health is Health.OPEN)

    def _set(self, service: str, is_serving: bool) -> None:
        if self._statuses.get(service) != is_serving:
            self._statuses[service] = is_serving
            status = health_pb2.HealthCheckResponse
            self._servicer.set(service, status.SERVING if is_serving else status.NOT_SERVING)

    def drain(self) -> None:
        """Answers NOT_SERVING from now on; `set_health` has no effect any more."""
        self._is_draining = True
        self._servicer.enter_graceful_shutdown()


def run_health(arguments: argparse.Namespace) -> int:
    """``microturn health``: queries the port once, for callers that can only run a program (a container engine).

    Returns:
        The exit code: 0 for SERVING (by default: the model answers turns), 1 otherwise; the reason is on stderr.
    """
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=arguments.service), timeout=arguments.timeout_s
            )
        except grpc.RpcError as error:
            console.say(f"{arguments.address}: {error.details()}")
            return 1
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    console.say(f"{arguments.address}: {name}")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
