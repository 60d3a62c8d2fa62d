"""A server for a while: `microturn serve` as a user starts it, in a process of its own, on free ports of loopback."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready.

    Attributes:
        address: of its gRPC endpoint.
        metrics_url: where its metrics are.
        pid: of `microturn serve`, whose descendants are all of its processes.
    """

    address: str
    metrics_url: str
    pid: int


@contextmanager
def running_server(model: str, *settings: str, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Serves a model until the block ends; yields the gRPC address. See `started_server`."""
    with started_server(model, *settings, arguments=arguments) as server:
        yield server.address


@contextmanager
def started_server(
    model: str, *settings: str, arguments: Sequence[str] = (), process_group: int | None = None
) -> Iterator[RunningServer]:
    """Serves a model until the block ends.

    Args:
        model: a directory, or the name of an embedded model.
        settings: `key=value`, as `--set` takes them.
        arguments: further ones of `microturn serve`.
        process_group: 0 for one of its own, which Ctrl-C does not reach; else it is this process's.

    Raises:
        RuntimeError: when the server does not get ready; it has said why on stderr.
    """
    grpc_port, metrics_port, health_port = free_ports(3)
    command = [sys.executable, "-m", "microturn.cli", "serve", "--model", model]
    command += ["--grpc-port", str(grpc_port)]
    command += ["--metrics-port", str(metrics_port), "--health-port", str(health_port)]
    command += ["--grace-s", "1"]  # at the end nobody's session is worth waiting for
    command += arguments
    for setting in settings:
        command += ["--set", setting]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=process_group) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready"):
                raise RuntimeError(f"the server did not start (exit code {process.wait()})")
            metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
            yield RunningServer(f"127.0.0.1:{grpc_port}", metrics_url, process.pid)
        finally:
            process.terminate()


def free_ports(num_ports: int) -> list[int]:
    """Ports of loopback that nobody listened on a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [int(bound.getsockname()[1]) for bound in sockets]
