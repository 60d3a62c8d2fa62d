"""The exceptions of this package, drawn once, and the two ways in which a failure reaches us.

    MicroturnError
    ├── InvalidArgument      INVALID_ARGUMENT     the turn itself is wrong: an option, a shape, a token id
    ├── NotFound             NOT_FOUND            the server has no session of this id
    ├── Expired              EXPIRED              the session was there; its idle time passed
    ├── ContextFull          CONTEXT_FULL         context + input + max_tokens exceed max_context
    ├── ResourceExhausted    RESOURCE_EXHAUSTED   no room now: sessions, queue or pages
    ├── FailedPrecondition   FAILED_PRECONDITION  right in itself, wrong for the session's present state
    │   ├── SessionClosed                         a turn on a session that you closed
    │   └── ModelChanged                          the session is lost, and another model is there now
    ├── PermissionDenied     PERMISSION_DENIED    the session belongs to somebody else
    ├── DeadlineExceeded     DEADLINE_EXCEEDED    the server's deadline passed; nothing was appended
    │   └── TurnTimeout                           this client waited timeout_s; what the server did is not known
    ├── Unavailable          UNAVAILABLE          draining, or the model's process is gone
    │   └── ConnectionLost                        the stream broke; what the server did with open turns is not known
    └── InternalError        INTERNAL             the server's fault
        └── ProtocolError                         the server's answer breaks the contract

A class on the second level carries the code of its parent and arises in this client alone. An error that came as a code
of the contract means that the turn changed nothing on the server. Knows nothing of sessions and streams.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    import grpc

ErrorCode = Literal[
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "EXPIRED",
    "CONTEXT_FULL",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "PERMISSION_DENIED",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",
    "INTERNAL",
]


class MicroturnError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: the code of the wire contract.
        message: one sentence that says what to do.
        details: numbers that the server added, such as ``retry_after_ms``, ``turn``, ``position`` or ``room``.
        route: to the server where the session lives now, if another one said so.
    """

    code: ClassVar[ErrorCode]
    route: str | None = None

    def __init__(self, message: str, details: Mapping[str, int] | None = None) -> None:
        super().__init__(message, details)
        self.message = message
        self.details: Mapping[str, int] = dict(details or {})

    def __str__(self) -> str:
        return self.message

    @property
    def retry_after_ms(self) -> int | None:
        """Milliseconds after which the server thinks that a retry may pass; None when it did not say."""
        return self.details.get("retry_after_ms")


class InvalidArgument(MicroturnError):
    """The turn itself is wrong: an option, a shape, a token id. Change it; a retry gets the same answer."""

    code = "INVALID_ARGUMENT"


class NotFound(MicroturnError):
    """The server has no session of this id, or no model of this name. Open a new session."""

    code = "NOT_FOUND"


class Expired(MicroturnError):
    """The session was there, and its idle time passed. Open a new session."""

    code = "EXPIRED"


class ContextFull(MicroturnError):
    """Context, input and ``max_tokens`` together exceed ``max_context``. Ask for less, or open a new session."""

    code = "CONTEXT_FULL"


class ResourceExhausted(MicroturnError):
    """The server has no room now. Try again after :attr:`~MicroturnError.retry_after_ms`."""

    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(MicroturnError):
    """The turn is right in itself and wrong for the session's present state."""

    code = "FAILED_PRECONDITION"


class SessionClosed(FailedPrecondition):
    """A turn was asked for on a session that this program has closed."""


class ModelChanged(FailedPrecondition):
    """The session is lost, and the server has another model now, to which nothing is told again. Open a new session."""


class PermissionDenied(MicroturnError):
    """The session belongs to somebody else, or a proxy on the way refused us."""

    code = "PERMISSION_DENIED"


class DeadlineExceeded(MicroturnError):
    """The deadline passed on the server before anything was appended."""

    code = "DEADLINE_EXCEEDED"


class TurnTimeout(DeadlineExceeded):
    """No end of the turn within ``timeout_s`` seconds. What was handed out of it stays; the session can be used on."""


class Unavailable(MicroturnError):
    """The server takes no turns now: it drains, stops, or its model is not loaded."""

    code = "UNAVAILABLE"


class ConnectionLost(Unavailable):
    """No stream to the server for as long as is tried. What became of the turn is not known."""


class InternalError(MicroturnError):
    """The server's fault, as its log says in more words."""

    code = "INTERNAL"


class ProtocolError(InternalError):
    """The server's answer breaks the wire contract, for example a last response without a status."""


_WIRE_CODES: Mapping[str, type[MicroturnError]] = {
    error.code: error
    for error in (
        InvalidArgument,
        NotFound,
        Expired,
        ContextFull,
        ResourceExhausted,
        FailedPrecondition,
        PermissionDenied,
        DeadlineExceeded,
        Unavailable,
        InternalError,
    )
}

_WIRE_MESSAGE = re.compile(
    r"(?P<code>[A-Z_]+): (?P<message>.*?)(?: \[(?P<details>(?:\w+=-?\d+|route=[^\s\]]+)(?: \w+=-?\d+)*)\])?",
    re.DOTALL,
)

# What Triton says before a turn reaches the model, where there is no code. The first phrase that occurs decides.
_TRITON_PHRASES: tuple[tuple[str, type[MicroturnError]], ...] = (
    ("must specify the START flag", NotFound),
    ("has no available versions", Unavailable),
    ("Request for unknown model", NotFound),
    ("is not healthy", Unavailable),
    ("Server is stopping", Unavailable),
    ("Server not ready", Unavailable),
    ("Request timeout expired", DeadlineExceeded),
    ("Exceeds maximum queue size", ResourceExhausted),
    ("correlation ID", InvalidArgument),
    ("unexpected inference input", InvalidArgument),
    ("unexpected shape for input", InvalidArgument),
    ("data-type is", InvalidArgument),
    ("byte size mismatch", InvalidArgument),
    ("incomplete string data", InvalidArgument),
    ("batch-size must be", InvalidArgument),
    ("invalid value type for", InvalidArgument),
    ("parameter keys starting with", InvalidArgument),
)

# A failure of the stream itself. Where it does not prove that the turn was refused, the outcome is not known.
_GRPC_STATUS: Mapping[str, type[MicroturnError]] = {
    "OK": ConnectionLost,
    "CANCELLED": ConnectionLost,
    "UNKNOWN": ConnectionLost,
    "INVALID_ARGUMENT": InvalidArgument,
    "DEADLINE_EXCEEDED": TurnTimeout,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": FailedPrecondition,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "FAILED_PRECONDITION": FailedPrecondition,
    "ABORTED": ConnectionLost,
    "OUT_OF_RANGE": InvalidArgument,
    "UNIMPLEMENTED": FailedPrecondition,
    "INTERNAL": ConnectionLost,
    "UNAVAILABLE": ConnectionLost,
    "DATA_LOSS": ConnectionLost,
}


def from_wire(text: str) -> MicroturnError:
    """The exception for the error message of a response: ``CODE: sentence [name=value …]`` or Triton's own words."""
    match = _WIRE_MESSAGE.fullmatch(text)
    if match is not None and match["code"] in _WIRE_CODES:
        details = dict(pair.split("=", 1) for pair in (match["details"] or "").split())
        route = details.pop("route", None)
        error = _WIRE_CODES[match["code"]](match["message"], {name: int(number) for name, number in details.items()})
        error.route = route
        return error
    for phrase, kind in _TRITON_PHRASES:
        if phrase in text:
            return kind(text)
    return InternalError(text)


def from_grpc(status: grpc.StatusCode, details: str | None) -> MicroturnError:
    """The exception for the end of a stream that still had something to deliver."""
    kind = _GRPC_STATUS.get(status.name, ConnectionLost)
    if details and "failed to connect" in details and "Socket closed" in details:
        details += "; what listens there takes no plain text: for TLS, give the client credentials="
    return kind(f"the stream ended: {details or 'no reason given'} (gRPC {status.name})")


def from_failure(failure: Exception) -> MicroturnError:
    """The exception for what ended a stream or a call: an error of gRPC's, or a fault of this client."""
    import grpc  # with the first client that is made: it takes longer to import than all that is here

    if isinstance(failure, grpc.RpcError):
        return from_grpc(failure.code(), failure.details())
    return InternalError(f"the client itself failed: {failure!r}")
