"""The error that ends ``microturn serve`` with one line on stderr."""

from __future__ import annotations


class ServeError(Exception):
    """The server cannot be started or kept running; the message is one sentence that says what to do."""
