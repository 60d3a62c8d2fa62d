"""Where the real Envoy puts sessions: on servers with few, on none that is full, and where they were before."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from microturn_client import AsyncClient, AsyncSession, Recovery, ResourceExhausted
from support.certificates import Authority
from support.cutting_proxy import CuttingProxy
from support.edge import Edge, TokenIssuer
from support.served import Served, Start

PATIENT = Recovery(give_up_after_s=60.0, give_up_opening_s=30.0)
AT_ONCE = Recovery(give_up_opening_s=0.0)
ROOM = 6  # sessions of each server


@pytest.fixture(scope="module")
def servers(start_tiny: Start) -> list[Served]:
    started = [start_tiny("--set", f"max_sessions={ROOM}", "--set", "num_threads=1") for _ in range(3)]
    for server in started:
        server.wait_until_ready(120)
    return started


@pytest.fixture
def credentials(authority: Authority, issuer: TokenIssuer) -> grpc.ChannelCredentials:
    return authority.credentials(issuer.issue("a tenant"))


@pytest.fixture
def line(edge: Edge) -> Iterator[CuttingProxy]:
    """The line from the client to the edge."""
    with CuttingProxy(edge.address) as line:
        yield line


@pytest.fixture
async def client(line: CuttingProxy, credentials: grpc.ChannelCredentials) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(line.address, credentials=credentials, recovery=PATIENT) as client:
        yield client


async def opened(client: AsyncClient, number: int) -> list[AsyncSession]:
    """Sessions that have had a turn, one after the other."""
    sessions = [client.session() for _ in range(number)]
    for session in sessions:
        await session.append([5, 6, 7])
    return sessions


async def close(sessions: list[AsyncSession]) -> None:
    await asyncio.gather(*(session.close() for session in sessions))


def place(session: AsyncSession) -> str:
    """The address of the server that the edge said the session is on."""
    route = session._core.requests.route
    assert route
    return base64.b64decode(route).decode()


def wait_for_degraded(edge: Edge, number: int) -> None:
    expected = f'envoy_cluster_membership_degraded{{envoy_cluster_name="servers"}} {number}\n'
    deadline_s = time.monotonic() + 30
    while expected not in edge.stats():
        assert time.monotonic() < deadline_s, [line for line in edge.stats().splitlines() if "membership" in line]
        time.sleep(0.1)


async def test_sessions_go_where_there_are_few(edge: Edge, servers: list[Served], client: AsyncClient) -> None:
    """By the hash of their ids they fell where they fell: with few sessions one server had twice as many as another."""
    edge.serve(servers)
    edge.wait_for_healthy(3)
    sessions = await opened(client, 12)
    places = Counter(map(place, sessions))
    assert len(places) == 3
    assert max(places.values()) - min(places.values()) <= 3, places  # by chance more of it, once in 25,000 times
    await close(sessions)


async def test_a_full_server_keeps_its_sessions_and_gets_no_other(
    edge: Edge, servers: list[Served], client: AsyncClient, line: CuttingProxy
) -> None:
    """It was chosen as any other, and who was sent there heard RESOURCE_EXHAUSTED while others had room."""
    edge.serve(servers)
    edge.wait_for_healthy(3)
    (kept,) = await opened(client, 1)
    (full,) = [server for server in servers if server.address == place(kept)]
    # Sessions that this Envoy knows nothing of: by its own count the full server has the fewest.
    async with AsyncClient(full.address, recovery=PATIENT) as direct:
        others = await opened(direct, ROOM - 1)
        wait_for_degraded(edge, 1)
        edge.wait_for_healthy(2)
        sessions = await opened(client, ROOM)
        assert place(kept) not in map(place, sessions)
        assert len(set(map(place, sessions))) == 2
        was_at = place(kept)
        line.cut()
        await kept.append([8])
        assert place(kept) == was_at
        assert not any("opened anew" in event.reason for event in kept.resumed)
        await close([*sessions, kept, *others])


async def test_who_finds_all_full_is_told_so_by_a_server(
    edge: Edge, servers: list[Served], client: AsyncClient, credentials: grpc.ChannelCredentials
) -> None:
    edge.serve(servers)
    wait_for_degraded(edge, 0)
    edge.wait_for_healthy(3)
    sessions = await opened(client, 3 * ROOM)
    assert set(Counter(map(place, sessions)).values()) == {ROOM}
    wait_for_degraded(edge, 3)
    async with AsyncClient(edge.address, credentials=credentials, recovery=AT_ONCE) as late:
        with pytest.raises(ResourceExhausted):
            await late.session().append([5])
    await close(sessions)
