"""A client that leaves while its conversation is told to the server is told for no longer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest
from starlette.requests import ClientDisconnect

from microturn_client.testing import FakeServer
from microturn_gateway import app
from microturn_gateway.app import build_app
from microturn_gateway.response_memory import ConnectionMemory
from microturn_gateway.response_socket import ResponseSocket
from microturn_gateway.response_store import ResponseStore
from microturn_gateway.settings import GatewaySettings

ROLES = ("user", "assistant")
TALK = [{"role": ROLES[index % 2], "content": f"line {index} of it."} for index in range(41)]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": TALK}),
        ("/v1/chat/completions", {"messages": TALK, "stream": True}),
        ("/v1/responses", {"input": TALK}),
        ("/v1/responses", {"input": TALK, "stream": True}),
    ],
)
async def test_a_client_that_left_is_told_for_no_longer(
    path: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its messages were told though nobody waited, and its place was held as long."""
    server = FakeServer()
    monkeypatch.setattr(app, "AsyncClient", lambda _address: server.async_client())
    gateway = build_app(GatewaySettings(max_sessions=1))
    body = iter([{"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}])
    sent = []

    async def receive() -> dict[str, Any]:
        return next(body, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"headers": headers, "query_string": b"", "scheme": "http", "http_version": "1.1", "root_path": ""}
    async with (
        gateway.router.lifespan_context(gateway),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(gateway), base_url="http://localhost") as http,
    ):
        async with asyncio.timeout(30):
            await gateway(scope, receive, send)
        assert server._sessions.num_turns_done < 5
        assert not sent
        hello = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        assert (await http.post("/v1/chat/completions", json=hello)).status_code == 200


async def test_a_connection_whose_client_left_ends() -> None:
    is_asked = asyncio.Event()

    class Socket:
        messages = iter([{"type": "websocket.receive", "text": '{"type": "response.create", "input": "Hello"}'}])

        async def receive(self) -> dict[str, Any]:
            if message := next(self.messages, None):
                return message
            await is_asked.wait()
            return {"type": "websocket.disconnect"}

    async def respond(_asked: Any, transport: Any) -> None:
        is_asked.set()
        await transport.left()
        raise ClientDisconnect

    memory = ConnectionMemory(ResponseStore(1, 60.0), b"one")
    async with asyncio.timeout(10):
        await ResponseSocket(Socket(), respond, memory, GatewaySettings()).serve()
    assert is_asked.is_set()
