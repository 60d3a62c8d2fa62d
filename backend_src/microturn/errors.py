"""The exception tree of the engine, drawn once, each class with its code on the wire.

    MicroturnError
    ├── InvalidArgument      the turn itself is wrong: an option, a shape, a token id
    ├── NotFound             no session of this id was ever here
    ├── Expired              the session was here; its idle time passed
    ├── ContextFull          context + input + max_tokens exceed max_context
    ├── ResourceExhausted    no room now: sessions, queue or pages
    ├── FailedPrecondition   right in itself, wrong for the session's present state
    ├── PermissionDenied     the session belongs to somebody else
    ├── DeadlineExceeded     the deadline passed before anything was appended
    ├── Unavailable          draining, or the engine has stopped
    └── InternalError        our fault

A rejected turn changes nothing. On the wire an error reads ``CODE: sentence [key=value …]``.
"""

from __future__ import annotations

from typing import ClassVar


class MicroturnError(Exception):
    """Base of all errors a turn can end with.

    Args:
        message: one sentence that says what to do.
        details: machine-readable extras for the wire, such as ``retry_after_ms=200``.
    """

    code: ClassVar[str]

    def __init__(self, message: str, **details: int) -> None:
        super().__init__(message)
        self.details = details

    def __str__(self) -> str:
        extras = " ".join(f"{key}={value}" for key, value in self.details.items())
        return f"{self.code}: {self.args[0]}" + (f" [{extras}]" if extras else "")


class InvalidArgument(MicroturnError):
    code = "INVALID_ARGUMENT"


class NotFound(MicroturnError):
    code = "NOT_FOUND"


class Expired(MicroturnError):
    code = "EXPIRED"


class ContextFull(MicroturnError):
    code = "CONTEXT_FULL"


class ResourceExhausted(MicroturnError):
    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(MicroturnError):
    code = "FAILED_PRECONDITION"


class PermissionDenied(MicroturnError):
    code = "PERMISSION_DENIED"


class DeadlineExceeded(MicroturnError):
    code = "DEADLINE_EXCEEDED"


class Unavailable(MicroturnError):
    code = "UNAVAILABLE"


class InternalError(MicroturnError):
    code = "INTERNAL"


def reason_of(error: Exception) -> str:
    """An exception of somebody else's code in one line: its kind, since a message alone may be a bare name."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
