"""The real Envoy, and what it wants to know of its clients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.replicated import Replicas
from support.served import Start


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority") / "ours")


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> TokenIssuer:
    return TokenIssuer(tmp_path_factory.mktemp("issuer") / "tokens.key")


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory, authority: Authority, issuer: TokenIssuer) -> Iterator[Edge]:
    """Envoy, without servers yet."""
    directory: Path = tmp_path_factory.mktemp("edge")
    (directory / "secrets").mkdir()
    authority.issue(directory / "secrets")
    (directory / "secrets" / "jwks.json").write_text(issuer.jwks())
    with closing(Edge(directory)) as edge:
        yield edge


@pytest.fixture
def replicas(start_tiny: Start, edge: Edge) -> Iterator[Replicas]:
    """Gone at the end, also for Envoy: it keeps servers that are no longer listed as long as they are healthy."""
    replicas = Replicas(start_tiny)
    yield replicas
    for server in replicas.started:
        server.close()
    edge.serve([])
    edge.wait_for_healthy(0)
