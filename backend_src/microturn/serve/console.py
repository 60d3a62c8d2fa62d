"""What ``serve`` says to the terminal: progress on stderr, and one line on stdout each time the server is ready.

A reader that went away must never stop the server, so a failed write is no error here.
"""

from __future__ import annotations

import contextlib
import os

_STDOUT, _STDERR = 1, 2


def say(message: str) -> None:
    """Tells a human, on stderr."""
    write_stderr(f"microturn: {message}")


def announce(line: str) -> None:
    """Tells a script, on stdout: the only lines there begin with ``ready``."""
    _write(_STDOUT, line)


def write_stderr(line: str) -> None:
    """Passes a line of the server's own log on."""
    _write(_STDERR, line)


def _write(descriptor: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{line}\n".encode(errors="replace"))
