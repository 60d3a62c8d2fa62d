"""Thirty sessions on three real servers behind the real Envoy, while one server is stopped, one killed and one added.

Each session says something every second. Whatever happens to its server, it hears what it would have heard undisturbed:
every token once, from the whole context.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from microturn_client import AsyncClient, AsyncSession, Recovery, Resumed, Tokens, TurnEnd
from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.served import Served

NUM_SESSIONS = 30
NUM_TURNS = 14
BEAT_S = 1.0
STOPPED_AT, KILLED_AT, ADDED_AT = 2, 7, 10
TURN = {"max_tokens": 4, "ignore_eos": True}
# What a shared machine may take; what it takes is printed.
PATIENT = Recovery(give_up_after_s=120.0, give_up_opening_s=60.0)


@dataclass
class Heard:
    """What one session heard, and how long it waited for each answer."""

    answers: list[list[int]] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    resumed: list[tuple[int, Resumed]] = field(default_factory=list)


@pytest.fixture(scope="module")
def servers(start: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> list[Served]:
    """Three that take part from the start and one that joins, with one directory of snapshots."""
    snapshots: Path = tmp_path_factory.mktemp("snapshots")
    started = [start(f"--snapshot-dir={snapshots}", "--drain-notice-s=2", "--set", "num_threads=1") for _ in range(4)]
    for server in started:
        server.wait_until_ready(120)
    return started


def said(session: int, number: int) -> list[int]:
    return random.Random(f"{session} {number}").choices(range(100, 400), k=8)


async def talk(session: AsyncSession, which: int, heard: Heard, before_turn: Callable[[int], Awaitable[None]]) -> None:
    async with session:
        for number in range(NUM_TURNS):
            await before_turn(number)
            asked_s = time.monotonic()
            answer: list[int] = []
            async for event in session.turn(said(which, number), **TURN):
                match event:
                    case Tokens():
                        answer += event.ids
                    case Resumed():
                        heard.resumed.append((number, event))
                    case TurnEnd(status):
                        heard.context_lens.append(status.context_len)
            heard.waited_s.append(time.monotonic() - asked_s)
            heard.answers.append(answer)


async def talk_all(client: AsyncClient, before_turn: Callable[[int], Awaitable[None]]) -> list[Heard]:
    """All sessions side by side; half of them sample."""
    heard = [Heard() for _ in range(NUM_SESSIONS)]
    async with asyncio.TaskGroup() as tasks:
        for which in range(NUM_SESSIONS):
            sampling = {"temperature": 0.9, "seed": which} if which % 2 else {}
            session = client.session(idle_timeout_s=300, **sampling)
            tasks.create_task(talk(session, which, heard[which], before_turn))
    return heard


async def test_sessions_outlive_their_servers(
    servers: list[Served], edge: Edge, authority: Authority, issuer: TokenIssuer
) -> None:
    async def at_once(_number: int) -> None:
        pass

    async with AsyncClient(servers[0].address, timeout_s=120, recovery=PATIENT) as client:
        undisturbed = await talk_all(client, at_once)

    stopped, killed, stays, added = servers
    edge.serve([stopped, killed, stays])
    edge.wait_for_healthy(3)
    begin_s = time.monotonic() + BEAT_S

    async def on_the_beat(number: int) -> None:
        await asyncio.sleep(begin_s + number * BEAT_S - time.monotonic() + 0.8 * BEAT_S * random.random())

    async def disturb() -> None:
        for number, event in ((STOPPED_AT, "stop"), (KILLED_AT, "kill"), (ADDED_AT, "add")):
            await asyncio.sleep(begin_s + number * BEAT_S - time.monotonic())
            if event == "stop":
                stopped.process.send_signal(signal.SIGTERM)
            elif event == "kill":
                killed.process.kill()
            else:
                edge.serve([stays, added])

    tls = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    credentials = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(issuer.issue("a tenant")))
    async with AsyncClient(edge.address, timeout_s=120, recovery=PATIENT, credentials=credentials) as client:
        disturbing = asyncio.create_task(disturb())
        heard = await talk_all(client, on_the_beat)
        await disturbing

    for which in range(NUM_SESSIONS):
        assert heard[which].answers == undisturbed[which].answers, which
        assert heard[which].context_lens == undisturbed[which].context_lens == [12 * n + 12 for n in range(NUM_TURNS)]
        assert all(event.exact for _, event in heard[which].resumed)
    assert stopped.process.wait(30) == 0
    moved = [number for one in heard for number, _ in one.resumed]
    assert any(STOPPED_AT <= number < KILLED_AT for number in moved)
    assert any(KILLED_AT <= number < ADDED_AT for number in moved)
    assert not any(
        "opened anew" in event.reason for one in heard for number, event in one.resumed if number < KILLED_AT
    )
    assert f'"server":"127.0.0.1:{stays.grpc_port}"' in edge.log.read_text()
    for name, first, last in (("stopped", STOPPED_AT, KILLED_AT), ("killed", KILLED_AT, ADDED_AT)):
        moved_s = [one.waited_s[number] for one in heard for number, _ in one.resumed if first <= number < last]
        all_s = sorted(seconds for one in heard for seconds in one.waited_s[first:last])
        print(f"{name}: {len(moved_s)} moved, longest {max(moved_s):.3f} s; all p50 {all_s[len(all_s) // 2]:.4f} s")
