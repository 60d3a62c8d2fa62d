"""Cross-origin requests: browsers ask before they let a page of another origin send and read."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from microturn_gateway.failures import Refusal
from microturn_gateway.http import refused


class Cors(CORSMiddleware):
    """Tells browsers that pages of these origins may call an application and read its answers and errors.

    Args:
        app: the application.
        origins: of pages, such as `https://app.example`.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("*",),  # a method that a path has not is the path's to refuse, by name
            allow_headers=("*",),
            expose_headers=("retry-after",),
            allow_private_network=True,  # who allows a page by name means it where the gateway is
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """What a browser is told that asks."""
        if not self.is_allowed_origin(request_headers["origin"]):
            message = f"pages of '{request_headers['origin']}' are not allowed here"
            return refused(Refusal("origin_not_allowed", message, http_status=403))
        return super().preflight_response(request_headers)
