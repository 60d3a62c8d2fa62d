"""What a client is told when something is wrong, as an error of OpenAI's shape.

One vocabulary of codes: those of the wire contract in lower case, and beside them the few that only a gateway has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from microturn_client import MicroturnError

_STATUS_OF: Mapping[str, int] = {
    "INVALID_ARGUMENT": 400,
    "CONTEXT_FULL": 400,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "EXPIRED": 404,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}


class Refusal(Exception):
    """What a client asked for is not done.

    Attributes:
        code: short and stable, for programs.
        message: one sentence that says what to do.
        param: the field that it is about, with dots for levels; None when it is about none.
        http_status: where it answers a request of its own.
        retry_after_s: seconds after which a retry may pass; None if unknown.
        room: tokens that an answer could have; 0 where it is refused for something else.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        http_status: int = 400,
        retry_after_s: float | None = None,
        room: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.http_status = http_status
        self.retry_after_s = retry_after_s
        self.room = room

    @property
    def type(self) -> str:
        """The kind of error, in OpenAI's words."""
        if self.http_status == 429:
            return "rate_limit_error"
        return "server_error" if self.http_status >= 500 else "invalid_request_error"

    @classmethod
    def of_parts(cls, refused: Sequence[Refusal]) -> Refusal:
        """What is wrong with several fields, in one sentence for each; `param` is the first of them."""
        first, message = refused[0], "; ".join(refusal.message for refusal in refused)
        return cls(first.code, message, param=first.param, http_status=first.http_status)

    def as_json(self) -> dict[str, Any]:
        """The `error` object of a response, an event or a failed answer."""
        return {"type": self.type, "code": self.code, "message": self.message, "param": self.param}


def no_such_model(asked_for: str, names: Sequence[str], param: str = "model") -> Refusal:
    """The server has another model, of these names."""
    there = ", ".join(f"'{name}'" for name in names)
    message = f"there is no model '{asked_for}' here, but {there}"
    return Refusal("model_not_found", message, param=param, http_status=404)


def from_client(error: MicroturnError) -> Refusal:
    """What the server or the client library said."""
    after_ms = error.retry_after_ms
    return Refusal(
        error.code.lower(),
        error.message,
        http_status=_STATUS_OF[error.code],
        retry_after_s=None if after_ms is None else after_ms / 1000,
        room=error.details.get("room", 0),
    )


def of_request(error: MicroturnError) -> Refusal:
    """What the server or the client library said, for a client of chat completions or responses.

    Frameworks tell a full context by OpenAI's code or words, and shorten the conversation or take another model.
    """
    refusal = from_client(error)
    if error.code == "CONTEXT_FULL":
        refusal.code = "context_length_exceeded"
        refusal.message = f"This model's maximum context length is exceeded: {error.message}"
    return refusal
