"""The contract suite on Dynamo's runtime: through an edge, and on a worker itself; tests/e2e has Triton's host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from microturn_client import AsyncClient, Client
from support.blocking import blocking
from support.client_contract import ClientContract
from support.dynamo import cluster_of, wait_for_workers
from support.share import IN_FLOAT32


@pytest.fixture(scope="module")
def addresses(smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with cluster_of(smollm2_dir, tmp_path_factory.mktemp("cluster"), *IN_FLOAT32) as cluster:
        worker, edge = cluster.start_worker(), cluster.start_edge()
        worker.wait_until_ready()
        edge.wait_until_ready()
        wait_for_workers(edge)
        yield {"worker": worker.address, "edge": edge.address}


@pytest.fixture(params=["edge-threads", "edge-asyncio", "worker-threads"])
def client(request: pytest.FixtureRequest, addresses: dict[str, str]) -> Iterator[Client]:
    place, _, kind = request.param.partition("-")
    address = addresses[place]
    with Client(address) if kind == "threads" else blocking(lambda: AsyncClient(address)) as client:
        yield client


class TestContract(ClientContract):
    ends_sequences = False
