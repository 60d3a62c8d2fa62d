"""A node dies without a word while sessions are saved every so often: they go on elsewhere, behind what was saved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.processes import kill_all
from support.replicated import BEAT_S, HeardInTime, Replicas, client_of, talk_all, talk_undisturbed, took, wait_for_beat
from support.s3_server import BUCKET, s3_with_bucket
from support.served import Served

SAVED_EVERY_S = 10
# Some way into the second interval.
NUM_TURNS, KILLED_AT = 20, 15


def kill_at_once(server: Served) -> None:
    """Supervisor, Triton and model process, before any can look after another."""
    kill_all([psutil.Process(server.process.pid), *server.tree()])


@pytest.fixture(params=["a directory", "an encrypted bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """Where sessions are saved, as options of a server."""
    if request.param == "a directory":
        yield [f"--snapshot-dir={tmp_path}"]
        return
    key_file = tmp_path / "key"
    key_file.write_text("sixteen letters!")
    with s3_with_bucket():
        yield [f"--snapshot-dir=s3://{BUCKET}/sessions", f"--set=snapshot_key_file={key_file}"]


async def test_all_sessions_of_a_dead_node_go_on(
    replicas: Replicas, edge: Edge, authority: Authority, issuer: TokenIssuer, place: list[str], num_talkers: int
) -> None:
    replicas.more_options = [*place, f"--set=snapshot_every_s={SAVED_EVERY_S}"]
    servers = replicas.start(3)
    edge.serve(servers)
    edge.wait_for_healthy(3)
    heard = [HeardInTime() for _ in range(num_talkers)]
    begin_s = time.monotonic() + BEAT_S
    killed_s = 0.0

    async def on_the_beat(number: int) -> bool:
        await wait_for_beat(begin_s, number)
        return number < NUM_TURNS

    async def kill_one() -> None:
        nonlocal killed_s
        while any(len(one.context_lens) < KILLED_AT for one in heard):
            await asyncio.sleep(0.05)
        killed_s = time.monotonic()
        await asyncio.to_thread(kill_at_once, servers[0])

    async with client_of(edge, authority, issuer) as client:
        killing = asyncio.create_task(kill_one())
        await talk_all([client], heard, on_the_beat)
        await killing

    undisturbed = await talk_undisturbed(servers[1].address, num_talkers, NUM_TURNS)
    for one, alone in zip(heard, undisturbed, strict=True):
        one.check_same(alone)
        assert one.context_lens == [12 * n + 12 for n in range(NUM_TURNS)]
    reasons = [event.reason for one in heard for at_s, event in one.resumed if at_s >= killed_s]
    print(set(reasons))
    print(f"{len(reasons)} moved; {took(heard, killed_s)}")
