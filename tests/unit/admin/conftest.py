"""What tests of servers that know each other share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fleet_servers import Server, StartServers, starting_servers


@pytest.fixture
def start_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartServers]:
    """Starts servers, which rely on each other at once."""
    monkeypatch.setattr("microturn.admin.rebalancer.SETTLED_S", 0.0)
    monkeypatch.setattr("microturn.admin.drain._TELLING_S", 0.0)
    with starting_servers() as start:
        yield start


@pytest.fixture
def two(start_servers: StartServers) -> list[Server]:
    return start_servers(2)
