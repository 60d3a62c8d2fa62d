"""The contract suite against the real server, for threads and for asyncio; tests/unit/client has the fake one.

The server has default settings, as its users have: a session is compared with another one of the same server, never
with plain transformers, and with 8-bit weights the suite takes a third of the time that it takes in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from microturn_client import AsyncClient, Client
from support.blocking import blocking
from support.client_contract import ClientContract
from support.share import model_server


@pytest.fixture(scope="module")
def address(smollm2_dir: str) -> Iterator[str]:
    with model_server(smollm2_dir) as server:
        yield server.address


@pytest.fixture(params=["threads", "asyncio"])
def client(request: pytest.FixtureRequest, address: str) -> Iterator[Client]:
    with Client(address) if request.param == "threads" else blocking(lambda: AsyncClient(address)) as client:
        yield client


class TestContract(ClientContract):
    pass
