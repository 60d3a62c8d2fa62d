"""Thirty sessions on three real servers behind the real Envoy, while one server is stopped, one killed and one added.

Each session says something every second. Whatever happens to its server, it hears what it would have heard undisturbed:
every token once, from the whole context.
"""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from microturn_client import AsyncClient, AsyncSession, Recovery
from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.heard import Heard
from support.served import Served, Start

NUM_SESSIONS = 30
NUM_TURNS = 14
BEAT_S = 1.0
STOPPED_AT, KILLED_AT, ADDED_AT = 2, 7, 10
TURN = {"max_tokens": 4, "ignore_eos": True}
# What a shared machine may take; what it takes is printed.
PATIENT = Recovery(give_up_after_s=120.0, give_up_opening_s=60.0)


@dataclass
class HeardInTime(Heard):
    """What one session heard; also when each answer had come, and how long it took."""

    waited_s: list[tuple[float, float]] = field(default_factory=list)


@pytest.fixture(scope="module")
def servers(start_tiny: Start, tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    """Three that take part from the start and one that joins, with one directory of snapshots."""
    snapshots: Path = tmp_path_factory.mktemp("snapshots")
    started = [
        start_tiny(f"--snapshot-dir={snapshots}", "--drain-notice-s=2", "--grace-s=60", "--set", "num_threads=1")
        for _ in range(4)
    ]
    for server in started:
        server.wait_until_ready(120)
    return started


def said(session: int, number: int) -> list[int]:
    return random.Random(f"{session} {number}").choices(range(100, 400), k=8)


async def talk(
    session: AsyncSession, which: int, heard: HeardInTime, before_turn: Callable[[int], Awaitable[None]]
) -> None:
    async with session:
        for number in range(NUM_TURNS):
            await before_turn(number)
            asked_s = time.monotonic()
            turn = session.turn(said(which, number), **TURN)
            heard.begin_turn()
            async for event in turn:
                heard.take(event)
            heard.waited_s.append((time.monotonic(), time.monotonic() - asked_s))


async def talk_all(
    client: AsyncClient, heard: list[HeardInTime], before_turn: Callable[[int], Awaitable[None]]
) -> None:
    """All sessions side by side; half of them sample."""
    async with asyncio.TaskGroup() as tasks:
        for which in range(NUM_SESSIONS):
            sampling = {"temperature": 0.9, "seed": which} if which % 2 else {}
            session = client.session(idle_timeout_s=300, **sampling)
            tasks.create_task(talk(session, which, heard[which], before_turn))


async def test_sessions_outlive_their_servers(
    servers: list[Served], edge: Edge, authority: Authority, issuer: TokenIssuer
) -> None:
    async def at_once(_number: int) -> None:
        pass

    undisturbed, heard = ([HeardInTime() for _ in range(NUM_SESSIONS)] for _ in range(2))
    async with AsyncClient(servers[0].address, timeout_s=120, recovery=PATIENT) as client:
        await talk_all(client, undisturbed, at_once)

    stopped, killed, stays, added = servers
    edge.serve([stopped, killed, stays])
    edge.wait_for_healthy(3)
    begin_s = time.monotonic() + BEAT_S
    is_stopped, is_killed = asyncio.Event(), asyncio.Event()

    async def on_the_beat(number: int) -> None:
        await asyncio.sleep(begin_s + number * BEAT_S - time.monotonic() + 0.8 * BEAT_S * random.random())
        # However slow the machine: each session speaks between the stop and the kill, and behind the kill.
        if number == KILLED_AT - 1:
            await is_stopped.wait()
        if number == KILLED_AT + 1:
            await is_killed.wait()

    async def all_have_heard(num_answers: int) -> None:
        while any(len(one.context_lens) < num_answers for one in heard):
            await asyncio.sleep(0.05)

    async def disturb() -> tuple[float, float]:
        """Returns when one was stopped, and when one was killed."""
        await all_have_heard(STOPPED_AT)
        stopped_s = time.monotonic()
        stopped.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(stopped.wait_for_exit, 120) == 0
        is_stopped.set()
        await all_have_heard(KILLED_AT)
        killed_s = time.monotonic()
        killed.process.kill()
        is_killed.set()
        await all_have_heard(ADDED_AT)
        edge.serve([stays, added])
        return stopped_s, killed_s

    tls = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    credentials = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(issuer.issue("a tenant")))
    async with AsyncClient(edge.address, timeout_s=120, recovery=PATIENT, credentials=credentials) as client:
        disturbing = asyncio.create_task(disturb())
        await talk_all(client, heard, on_the_beat)
        stopped_s, killed_s = await disturbing

    for which in range(NUM_SESSIONS):
        heard[which].check_same(undisturbed[which])
        assert heard[which].context_lens == [12 * n + 12 for n in range(NUM_TURNS)]
    for name, begun_s, ended_s in (("stopped", stopped_s, killed_s), ("killed", killed_s, float("inf"))):
        took_s = [took_s for one in heard for at_s, took_s in one.waited_s if begun_s <= at_s < ended_s]
        events = [event for one in heard for at_s, event in one.resumed if begun_s <= at_s < ended_s]
        assert events, f"no session was on the server that was {name}"
        if name == "stopped":
            assert not any("opened anew" in event.reason for event in events)
        p50_s, longest_s = statistics.median(took_s), max(took_s)
        print(f"{name}: {len(events)} moved; a turn took {p50_s:.3f} s (p50), {longest_s:.3f} s at most")
