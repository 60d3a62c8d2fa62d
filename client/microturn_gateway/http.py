"""What the HTTP endpoints share: a body within its limit, and a refusal as a response."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from microturn_gateway.failures import Refusal
from microturn_gateway.fields import parse_object


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
    return JSONResponse({"error": refusal.as_json()}, refusal.http_status, headers)
