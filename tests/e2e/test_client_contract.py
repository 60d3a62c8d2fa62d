"""The contract suite against the real server, for threads and for asyncio; tests/unit/client has the fake one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from microturn_client import AsyncClient, Client
from support.blocking import blocking
from support.client_contract import ClientContract


@pytest.fixture(params=["threads", "asyncio"])
def client(request: pytest.FixtureRequest, server: str) -> Iterator[Client]:
    with Client(server) if request.param == "threads" else blocking(lambda: AsyncClient(server)) as client:
        yield client


class TestContract(ClientContract):
    pass
