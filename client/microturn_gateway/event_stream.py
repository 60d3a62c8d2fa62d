"""Answers to HTTP requests: server-sent events until the client has them all or takes no more, or one piece of JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Send

_LAST = "data: [DONE]\n\n"


class JsonBody:
    """An answer in one piece: the response that its last event tells.

    Args:
        receive: of the ASGI request.
        send: of the ASGI request.

    Attributes:
        has_begun: never; what fails is told by the status of the answer.
        is_broken: whether the client has closed the connection.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self.has_begun = False
        self.is_broken = False
        self._receive = receive
        self._send = send
        self._whole: Any = None

    async def left(self) -> None:
        """Returns when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_broken = True

    async def begin(self) -> None:
        """Nothing is sent before the end."""

    async def tell(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Remembers the response as far as it has come."""
        for event in events:
            self._whole = event.get("response", self._whole)

    async def end(self) -> None:
        """Sends the response."""
        await self.whole(self._whole)

    async def whole(self, value: Any) -> None:
        """Sends JSON."""
        await JSONResponse(value)({"type": "http"}, self._receive, self._send)


class EventStream(JsonBody):
    """An answer as server-sent events.

    Args:
        receive: of the ASGI request.
        send: of the ASGI request.
        timeout_s: how long the client may take nothing before it is given up, seconds.

    Attributes:
        has_begun: whether the client has been told that there is a stream.
        is_broken: whether the client takes no more.
    """

    def __init__(self, receive: Receive, send: Send, timeout_s: float) -> None:
        super().__init__(receive, send)
        self._timeout_s = timeout_s

    async def begin(self) -> None:
        """Sends the headers."""
        self.has_begun = True
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await self._take({"type": "http.response.start", "status": 200, "headers": headers})

    async def tell(self, events: Sequence[Mapping[str, Any]]) -> None:
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
