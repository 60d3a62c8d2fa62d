"""Runs `microturn serve` in a child process, on free ports of loopback, for tools and tests."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

_FIRST_PORT, _NUM_PORTS = 15_000, 1 << 14
_NUM_OF_PROCESS = 64
_port_numbers = itertools.count(os.getpid() * _NUM_OF_PROCESS)


@dataclass(frozen=True)
class RunningServer:
    """A server that is ready.

    Attributes:
        address: of its gRPC endpoint.
        metrics_url: of its Prometheus metrics.
        pid: of `microturn serve`, whose descendants are all of its processes.
    """

    address: str
    metrics_url: str
    pid: int


@contextmanager
def running_server(
    model: str, *settings: str, arguments: Sequence[str] = (), log_path: Path | None = None
) -> Iterator[str]:
    """Serves a model until the block ends; yields the gRPC address. See `started_server`."""
    with started_server(model, *settings, arguments=arguments, log_path=log_path) as server:
        yield server.address


@contextmanager
def started_server(
    model: str,
    *settings: str,
    arguments: Sequence[str] = (),
    process_group: int | None = None,
    log_path: Path | None = None,
) -> Iterator[RunningServer]:
    """Serves a model until the block ends.

    Args:
        model: a directory, a GGUF file, or the name of an embedded model.
        settings: `key=value`, as `--set` takes them.
        arguments: further ones of `microturn serve`.
        process_group: 0 for one of its own, which Ctrl-C does not reach; else it is this process's.
        log_path: a file for what the server writes to stderr; None leaves it on this process's stderr.

    Raises:
        RuntimeError: the server did not get ready; stderr or the log says why.
        OSError: the log cannot be written.
    """
    grpc_port, metrics_port, health_port = free_ports(3)
    command = [sys.executable, "-m", "microturn.cli", "serve", "--model", model]
    command += ["--grpc-port", str(grpc_port)]
    command += ["--metrics-port", str(metrics_port), "--health-port", str(health_port)]
    command += ["--grace-s", "1"]  # no session needs to end by itself
    command += arguments
    for setting in settings:
        command += ["--set", setting]
    with (
        nullcontext() if log_path is None else log_path.open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, process_group=process_group
        ) as process,
    ):
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready"):
                raise RuntimeError(f"the server did not start (exit code {process.wait()})")
            metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
            yield RunningServer(f"127.0.0.1:{grpc_port}", metrics_url, process.pid)
        finally:
            process.terminate()


def free_ports(num_ports: int) -> list[int]:
    """Ports of loopback that are free, others with each call.

    They are below those that Linux gives to whoever connects to somewhere, since a server may listen to its ports only
    seconds later. Of processes side by side each begins elsewhere.
    """
    found: list[int] = []
    while len(found) < num_ports:
        port = _FIRST_PORT + next(_port_numbers) % _NUM_PORTS
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found
