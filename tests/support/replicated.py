"""Sessions that talk on a beat with servers that know each other, behind the real Envoy."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from microturn.serve.child import free_ports
from microturn_client import AsyncClient, AsyncSession, Recovery, TurnEnd
from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.heard import Heard
from support.served import Served, Start

BEAT_S = 1.0
TURN = {"max_tokens": 4, "ignore_eos": True}
# KV tokens of 60 sessions on one server until their contexts are full, for as many turns of 12 tokens as a slow machine
# needs to replace all servers: in a smaller pool a session loses its KV, and computes its context again.
ROOM_FOR_ALL = 60 * 8192
# What a shared machine may take; what it takes is printed.
PATIENT = Recovery(give_up_after_s=120.0, give_up_opening_s=60.0)


@dataclass
class HeardInTime(Heard):
    """What one session heard; also when each answer had come, how long it took, and what was computed for it."""

    waited_s: list[tuple[float, float]] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)


class Replicas:
    """Servers that know each other.

    Attributes:
        started: in the order of their starts.
        more_options: of those that are started from now on.
    """

    def __init__(self, start_tiny: Start) -> None:
        self.started: list[Served] = []
        self.more_options: list[str] = []
        self._start = start_tiny
        self._peer_ports = free_ports(8)
        peers = ",".join(f"127.0.0.1:{port}" for port in self._peer_ports)
        self._options = [f"--set=peers={peers}", "--drain-notice-s=2", "--grace-s=60", "--set=num_threads=1"]
        self._options += [f"--set=kv_tokens={ROOM_FOR_ALL}"]

    def start(self, number: int) -> list[Served]:
        new = [
            self._start(*self._options, *self.more_options, f"--peer-port={self._peer_ports.pop()}")
            for _ in range(number)
        ]
        self.started += new
        for server in new:
            server.wait_until_ready(120)
        return new


def said(session: int, number: int) -> list[int]:
    return random.Random(f"{session} {number}").choices(range(100, 400), k=8)


# Waits until a session's turn of this number is due; False where it says no more.
BeforeTurn = Callable[[int], Awaitable[bool]]


async def wait_for_beat(begin_s: float, number: int) -> None:
    """Until some time of a beat, counted from `begin_s` by `time.monotonic`."""
    await asyncio.sleep(begin_s + number * BEAT_S - time.monotonic() + 0.8 * BEAT_S * random.random())


async def talk(session: AsyncSession, which: int, heard: HeardInTime, before_turn: BeforeTurn) -> None:
    async with session:
        for number in itertools.count():
            if not await before_turn(number):
                return
            asked_s = time.monotonic()
            turn = session.turn(said(which, number), **TURN)
            heard.begin_turn()
            async for event in turn:
                heard.take(event)
                if isinstance(event, TurnEnd):
                    heard.num_computed.append(event.status.usage.computed_tokens)
            heard.waited_s.append((time.monotonic(), time.monotonic() - asked_s))


async def talk_all(clients: Sequence[AsyncClient], heard: list[HeardInTime], before_turn: BeforeTurn) -> None:
    """All sessions side by side, each by one of the clients; half of them sample."""
    # A collection would look for 0.3 s through all that the tests have imported, and turns would seem to take so long.
    gc.collect()
    gc.freeze()
    async with asyncio.TaskGroup() as tasks:
        for which, one in enumerate(heard):
            sampling = {"temperature": 0.9, "seed": which} if which % 2 else {}
            session = clients[which % len(clients)].session(idle_timeout_s=300, **sampling)
            tasks.create_task(talk(session, which, one, before_turn))


async def talk_undisturbed(address: str, num_sessions: int, num_turns: int) -> list[HeardInTime]:
    """On one server, without a beat."""

    async def at_once(number: int) -> bool:
        return number < num_turns

    heard = [HeardInTime() for _ in range(num_sessions)]
    async with AsyncClient(address, timeout_s=120, recovery=PATIENT) as client:
        await talk_all([client], heard, at_once)
    return heard


@asynccontextmanager
async def client_of(edge: Edge, authority: Authority, issuer: TokenIssuer) -> AsyncIterator[AsyncClient]:
    credentials = authority.credentials(issuer.issue("a tenant"))
    async with AsyncClient(edge.address, timeout_s=120, recovery=PATIENT, credentials=credentials) as client:
        yield client


def took(heard: list[HeardInTime], since_s: float = 0.0) -> str:
    """How long turns took, those in which a session moved and the others."""
    moved, others = [], []
    longest_s, why = 0.0, ""
    for one in heard:
        for at_s, took_s in one.waited_s:
            reasons = [event.reason for moved_s, event in one.resumed if at_s - took_s <= moved_s <= at_s]
            if at_s >= since_s:
                (moved if reasons else others).append(took_s)
                if reasons and took_s > longest_s:
                    longest_s, why = took_s, " and ".join(reasons)
    times = "; ".join(
        f"{name} {statistics.median(all_s):.3f} s (p50), {sorted(all_s)[int(0.99 * len(all_s))]:.3f} s (p99), "
        f"{max(all_s):.3f} s at most"
        for name, all_s in (("a turn in which a session moved took", moved), ("another", others))
    )
    return f"{times}; the longest that moved: {why}"
