"""`microturn gateway` as it is typed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gateway_command(server: str, port: int = 0) -> Iterator[str]:
    """Runs it until the block ends, in peace.

    Yields:
        The address of its page.
    """
    command = [sys.executable, "-m", "microturn.cli", "gateway", "--server", server, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            assert said.startswith("ready at http://127.0.0.1:"), said
            yield said.split()[2]
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")
