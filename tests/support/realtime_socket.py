"""A bare WebSocket to the gateway: what the server says, and how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed


@asynccontextmanager
async def connected(address: str, path: str = "/v1/realtime", **options: Any) -> AsyncIterator[ClientConnection]:
    """Connects to a gateway; all that is done must be over within a minute."""
    async with asyncio.timeout(60), connect(f"ws://{address}{path}", proxy=None, **options) as socket:
        yield socket


async def received(socket: ClientConnection) -> dict[str, Any]:
    """The next event."""
    event: dict[str, Any] = json.loads(await socket.recv())
    return event


async def closed_with(socket: ClientConnection) -> tuple[int, str]:
    """The code and the reason that the server closes with, now that it has no more to say."""
    with pytest.raises(ConnectionClosed) as closed:
        await socket.recv()
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason
