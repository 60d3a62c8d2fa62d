"""The exception tree of the engine; each class has its code on the wire.

    MicroturnError
    ├── InvalidArgument      the turn itself is wrong: an option, a shape, a token id
    ├── NotFound             there was never a session with this id
    ├── Expired              the session has ended: its idle time passed
    ├── ContextFull          context + input + max_tokens exceed max_context
    ├── ResourceExhausted    no room now: sessions, queue or pages
    ├── FailedPrecondition   valid, but not in the session's present state
    ├── PermissionDenied     the session belongs to another client
    ├── DeadlineExceeded     the deadline passed before anything was appended
    ├── Unavailable          draining, or the engine has stopped
    └── InternalError        a fault of the server

A rejected turn changes nothing. On the wire an error reads ``CODE: sentence [key=value …]``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class MicroturnError(Exception):
    """Base of all errors a turn can end with.

    Args:
        message: one sentence that says what is wrong and what to do.
        details: machine-readable extras for the wire, such as ``retry_after_ms=200``; a text has no spaces.
    """

    code: ClassVar[str]

    def __init__(self, message: str, **details: int | str) -> None:
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


def error_of(code: str, message: str) -> MicroturnError:
    """The exception of a code on the wire; InternalError for one that is not known."""
    return next((kind for kind in MicroturnError.__subclasses__() if kind.code == code), InternalError)(message)


def reason_of(error: Exception) -> str:
    """An exception of third-party code in one line: with its type, since its message may be a bare name."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def did_you_mean(unknown: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown name: its nearest known neighbour, or all known names."""
    names = sorted(known)
    # A text much longer than any name cannot be one, and comparing it would take long.
    nearest = difflib.get_close_matches(unknown[:100], names, n=1, cutoff=0.5)
    return f"did you mean '{nearest[0]}'?" if nearest else f"known are: {', '.join(names)}"
