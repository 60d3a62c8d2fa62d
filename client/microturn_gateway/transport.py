"""How one response reaches its client: as server-sent events, as a body of JSON, or over a WebSocket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from microturn_gateway.exchange import Client


class Transport(Client, Protocol):
    """The way to the client that waits for a response."""

    @property
    def has_begun(self) -> bool:
        """Whether the client has been told that there is a response: a refusal comes too late then."""

    async def begin(self) -> None:
        """There is a response."""

    async def tell(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Events of it."""

    async def end(self) -> None:
        """There is no more of it."""
