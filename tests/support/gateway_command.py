"""`microturn gateway` as it is typed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class StartedGateway:
    """A gateway that is ready.

    Attributes:
        address: of its page.
        pid: of its one process.
    """

    address: str
    pid: int


@contextmanager
def gateway_command(server: str, port: int = 0) -> Iterator[str]:
    """Runs it until the block ends, in peace.

    Yields:
        The address of its page.
    """
    with started_gateway(server, "--port", str(port)) as gateway:
        yield gateway.address


@contextmanager
def started_gateway(server: str, *arguments: str) -> Iterator[StartedGateway]:
    """Runs it with these arguments until the block ends, in peace."""
    command = [sys.executable, "-m", "microturn.cli", "gateway", "--server", server, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            assert said.startswith("ready at http://127.0.0.1:"), said
            yield StartedGateway(said.split()[2], process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
