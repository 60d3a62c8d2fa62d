"""Sessions on the beat in one asyncio process, and what they cost it: a program of its own, with nothing else in it.

    python -m load_tests.bench.client_beat SESSIONS SECONDS [grpc]      prints its `Costs` as JSON

With `grpc` the server is another process, else a transport in this one. See `client_cost` for what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field

import psutil

from load_tests.bench.beat_level import BEAT_S
from load_tests.bench.bystanders import bystanders
from load_tests.bench.counting_server import CountingClient, counting_server
from microturn_client import AsyncClient, AsyncSession, Tokens

NUM_INPUT = NUM_OUTPUT = 4
# The first seconds open streams, and fill caches and allocators.
_WARM_UP_S = 5


@dataclass
class Costs:
    """What was seen.

    Attributes:
        num_sessions: at once.
        latencies_ms: of every turn, from when it was due to its end.
        turn_ms: processor time of a turn, once a second.
        memory_mb: of the process, at the beginning and once a second.
        transcripts_mb: what its sessions keep of themselves, likewise.
        others_share: of the processor, which others used meanwhile.
    """

    num_sessions: int
    latencies_ms: Sequence[float]
    turn_ms: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    transcripts_mb: list[float] = field(default_factory=list)
    others_share: float = 0.0


async def _measure(client: AsyncClient, num_sessions: int, seconds: int) -> Costs:
    async with client:
        talks = _Talks(client, num_sessions)
        await talks.keep_beat(_WARM_UP_S)
        costs = Costs(num_sessions, [])
        watching = asyncio.create_task(_watch(client, talks, costs, seconds))
        with bystanders() as others:
            await talks.keep_beat(seconds)
        await watching
        costs.others_share, costs.latencies_ms = others.share, talks.latencies_ms.tolist()
    return costs


class _Talks:
    """Sessions that keep the beat, each in a phase of its own.

    Attributes:
        num_turns: that have ended since the last beat began.
        latencies_ms: of these, and room for those to come, so that taking notes takes no memory.
    """

    def __init__(self, client: AsyncClient, num_sessions: int) -> None:
        self._sessions = [client.session() for _ in range(num_sessions)]
        self.num_turns = 0
        self.latencies_ms = array("d")

    @property
    def transcripts_mb(self) -> float:
        return sum(session._core.transcript.num_bytes for session in self._sessions) / 1e6

    async def keep_beat(self, seconds: int) -> None:
        """All take their turns for so long."""
        num_beats = round(seconds / BEAT_S)
        self.num_turns = 0
        self.latencies_ms = array("d", [0.0]) * (num_beats * len(self._sessions))
        begin_s = time.perf_counter() + BEAT_S
        phases_s = (begin_s + BEAT_S * index / len(self._sessions) for index in range(len(self._sessions)))
        await asyncio.gather(*(self._talk(*talk, num_beats) for talk in zip(self._sessions, phases_s, strict=True)))

    async def _talk(self, session: AsyncSession, first_s: float, num_beats: int) -> None:
        for number in range(num_beats):
            due_s = first_s + number * BEAT_S
            await asyncio.sleep(due_s - time.perf_counter())
            ids: list[int] = []
            async for event in session.turn([number] * NUM_INPUT, max_tokens=NUM_OUTPUT):
                if isinstance(event, Tokens):
                    ids += event.ids
            self.latencies_ms[self.num_turns] = (time.perf_counter() - due_s) * 1e3
            self.num_turns += 1
            if ids != list(range(session.context_len - NUM_OUTPUT, session.context_len)):
                raise RuntimeError(f"{ids} at the end of {session.context_len} tokens")


async def _watch(client: AsyncClient, talks: _Talks, costs: Costs, seconds: int) -> None:
    """Notes what a second costs, each second."""
    process = psutil.Process()

    def look() -> tuple[float, int]:
        costs.memory_mb.append(process.memory_info().rss / 1e6)
        costs.transcripts_mb.append(talks.transcripts_mb)
        servers_s = client.server_s if isinstance(client, CountingClient) else 0.0
        return time.process_time() - servers_s, talks.num_turns

    begun_s = time.perf_counter() + BEAT_S
    used_s, num_turns = look()
    for second in range(1, seconds + 1):
        await asyncio.sleep(begun_s + second - time.perf_counter())
        before_s, num_before = used_s, num_turns
        used_s, num_turns = look()
        if num_turns > num_before:
            costs.turn_ms.append((used_s - before_s) / (num_turns - num_before) * 1e3)


def _main(num_sessions: str, seconds: str, transport: str = "") -> None:
    with counting_server() if transport == "grpc" else nullcontext() as address:
        client = CountingClient() if address is None else AsyncClient(address)
        print(json.dumps(asdict(asyncio.run(_measure(client, int(num_sessions), int(seconds))))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
