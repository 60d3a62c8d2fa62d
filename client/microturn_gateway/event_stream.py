"""Server-sent events to one client, until it has them all or takes no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Send

_LAST = "data: [DONE]\n\n"


class EventStream:
    """The body of one response.

    Args:
        send: of the ASGI request.
        timeout_s: how long the client may take nothing before it is given up, seconds.

    Attributes:
        has_begun: whether the client has been told that there is a stream.
        is_broken: whether the client takes no more.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self.has_begun = False
        self.is_broken = False
        self._send = send
        self._timeout_s = timeout_s

    async def begin(self) -> None:
        """Sends the headers."""
        self.has_begun = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await self._take({"type": "http.response.start", "status": 200, "headers": headers})

    async def tell(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Sends events, each under the name that is its type."""
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
        if text:
            await self.write(text)

    async def write(self, text: str) -> None:
        """Sends events as they are written."""
        await self._take({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def end(self) -> None:
        """Says that there is no more."""
        await self._take({"type": "http.response.body", "body": _LAST.encode(), "more_body": False})

    async def _take(self, message: dict[str, Any]) -> None:
        if self.is_broken:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            self.is_broken = True
