"""Requests whose clients do not wait for the answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from microturn_gateway.app import build_app
from microturn_gateway.settings import GatewaySettings


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/realtime/client_secrets"])
def test_who_leaves_before_all_is_said_is_no_fault_of_ours(path: str) -> None:
    """Each left a traceback in the log."""
    parts = [{"type": "http.request", "body": b'{"messages": [', "more_body": True}, {"type": "http.disconnect"}]
    told: list[Any] = []

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    asyncio.run(build_app(GatewaySettings())(scope, receive, send))
    assert not [message for message in told if message.get("status", 0) >= 500]
