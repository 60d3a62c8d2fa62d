"""What the HTTP endpoints share: a body within its limit, and errors of every kind as responses of OpenAI's shape."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from microturn_gateway.access import Access
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import parse_object

# In the scope of a request that was refused: the code.
REFUSED = "microturn.refused"


async def read_body(request: Request, max_bytes: int) -> Mapping[str, Any]:
    """The JSON object that a request brings.

    Raises:
        Refusal: it is none, or too long; the rest of it is not read then.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise Refusal("too_large", f"a request has at most {max_bytes} bytes", http_status=413)
    return parse_object(bytes(body))


def refused(refusal: Refusal) -> JSONResponse:
    """A refusal as a response of OpenAI's shape."""
    headers = {}
    if refusal.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(refusal.retry_after_s))
    if refusal.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return _RefusedResponse(refusal, headers)


class _RefusedResponse(JSONResponse):
    """Leaves its code in the scope, to be counted."""

    def __init__(self, refusal: Refusal, headers: Mapping[str, str]) -> None:
        super().__init__({"error": refusal.as_json()}, refusal.http_status, headers)
        self._code = refusal.code

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it."""
        scope[REFUSED] = self._code
        await super().__call__(scope, receive, send)


async def serve(
    access: Access, answer: Callable[[Request, Send], Awaitable[None]], scope: Scope, receive: Receive, send: Send
) -> None:
    """Has a request answered, if whoever sends it may; a refusal becomes its answer."""
    request = Request(scope, receive)
    try:
        access.check_place(request.headers)
        access.check_token(request.headers)
        await answer(request, send)
    except ClientDisconnect:
        return  # before it had said all, or before its answer began
    except Refusal as refusal:
        await refused(refusal)(scope, receive, send)


async def _not_served(request: Request, error: Exception) -> Response:
    """What the router says of a path or a method that is not here."""
    assert isinstance(error, HTTPException)
    code = "method_not_supported" if error.status_code == 405 else "unknown_url"
    elsewhere = "" if request.url.path.startswith("/v1") else ", where paths of the API begin with /v1"
    message = f"there is no {request.method} {request.url.path} here{elsewhere}"
    response = refused(Refusal(code, message, http_status=error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _failed(_request: Request, _error: Exception) -> Response:
    """A fault of ours: the log has what it was."""
    return refused(Refusal("internal", "the gateway failed: its log says why", http_status=500))


# How an application answers where no endpoint does.
ERROR_HANDLERS: Mapping[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _not_served,
    Exception: _failed,
}
