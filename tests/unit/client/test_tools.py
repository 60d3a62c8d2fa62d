"""The contract of tools against the fake server, for threads and for asyncio; tests/e2e runs it against a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from microturn_client import Client
from microturn_client.testing import FakeServer
from support.blocking import blocking
from support.tool_contract import ToolContract


@pytest.fixture(params=["threads", "asyncio"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    server = FakeServer()
    if request.param == "threads":
        with server.client(timeout_s=20.0) as client:
            yield client
    else:
        with blocking(lambda: server.async_client(timeout_s=20.0)) as client:
            yield client


class TestToolContract(ToolContract):
    pass
