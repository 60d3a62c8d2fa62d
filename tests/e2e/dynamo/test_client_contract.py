"""The contract suite on Dynamo's runtime: through an edge, and on a worker itself; tests/e2e has Triton's host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from microturn_client import AsyncClient, Client
from support.blocking import blocking
from support.client_contract import ClientContract


@pytest.fixture(params=["edge-asyncio", "worker-threads"])
def client(request: pytest.FixtureRequest, addresses: dict[str, str]) -> Iterator[Client]:
    place, _, kind = request.param.partition("-")
    address = addresses[place]
    with Client(address) if kind == "threads" else blocking(lambda: AsyncClient(address)) as client:
        yield client


class TestContract(ClientContract):
    ends_sequences = False
