"""What ``serve`` prints: progress on stderr, and one line on stdout each time the server is ready.

The server must outlive the terminal and the readers of its pipes, so a failed write is ignored.
"""

from __future__ import annotations

import contextlib
import os

_STDOUT, _STDERR = 1, 2


def say(message: str) -> None:
    """Tells the user, on stderr."""
    write_stderr(f"microturn: {message}")


def announce(line: str) -> None:
    """Tells a program, on stdout: the only lines there begin with ``ready``."""
    _write(_STDOUT, line)


def suggest(text: str) -> None:
    """Tells a user at a terminal what to do next, on stderr; a program that reads the output gets none of it."""
    if os.isatty(_STDOUT) and stderr_is_terminal():
        write_stderr(text)


def write_stderr(line: str) -> None:
    """Passes a line of the server's own log on."""
    _write(_STDERR, line)


def stderr_is_terminal() -> bool:
    """Whether stderr is a terminal."""
    return os.isatty(_STDERR)


def _write(descriptor: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{line}\n".encode(errors="replace"))
