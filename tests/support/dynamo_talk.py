"""Sessions that talk on a beat with workers behind edges, while a test disturbs them."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from microturn_client import AsyncClient
from support.dynamo import Cluster, Process, wait_for_workers
from support.replicated import BEAT_S, PATIENT, HeardInTime, talk_all, talk_undisturbed, wait_for_beat

Disturb = Callable[["Talk"], Awaitable[None]]


class Talk:
    """So many sessions on a beat, until `end`."""

    def __init__(self, num_sessions: int) -> None:
        self.heard = [HeardInTime() for _ in range(num_sessions)]
        self._begin_s = time.monotonic() + BEAT_S
        self._last_turn = 2**30

    @property
    def num_resumed(self) -> int:
        return sum(len(one.resumed) for one in self.heard)

    @property
    def num_turns(self) -> int:
        return self._last_turn + 1

    def end(self) -> None:
        """So many turns more that each has spoken since, all of them the same number."""
        self._last_turn = max(len(one.answers) for one in self.heard) + 2

    async def all_have_heard(self, num_answers: int) -> None:
        while any(len(one.context_lens) < num_answers for one in self.heard):
            await asyncio.sleep(0.05)

    async def all_have_spoken_again(self) -> None:
        await self.all_have_heard(max(len(one.answers) for one in self.heard) + 1)

    async def after(self, act: Callable[[], None]) -> float:
        """Does something that ends streams: how long a turn took at most from then on, over two rounds."""
        await self.all_have_spoken_again()
        num_before, begun_s = self.num_resumed, time.monotonic()
        act()
        await self.all_have_spoken_again()
        await self.all_have_spoken_again()
        assert self.num_resumed > num_before, "nothing was on it"
        return self.took_since(begun_s, time.monotonic())

    async def before_turn(self, number: int) -> bool:
        await wait_for_beat(self._begin_s, number)
        return number <= self._last_turn

    async def run(self, edges: Sequence[Process], disturb: Disturb) -> None:
        async with clients_of(edges) as clients:
            disturbing = asyncio.create_task(disturb(self))
            disturbing.add_done_callback(lambda _: self.end())
            await talk_all(clients, self.heard, self.before_turn)
            await disturbing

    async def lose(self, edge: Process, killed: Process, frozen: Process) -> dict[str, float]:
        """An edge and a worker are killed, another worker stands still: how long a turn took at most after each."""
        return {
            "edge killed": await self.after(edge.kill),
            "worker killed": await self.after(killed.kill),
            "worker frozen": await self.after(lambda: frozen.process.send_signal(signal.SIGSTOP)),
        }

    async def check_all_there(self, worker: Process) -> None:
        """As `check_same`; and each turn came behind the whole context before it."""
        await self.check_same(worker)
        for one in self.heard:
            assert one.context_lens == [12 * n + 12 for n in range(self.num_turns)]

    async def check_same(self, worker: Process) -> None:
        """Each has heard what it hears on this worker alone."""
        undisturbed = await talk_undisturbed(worker.address, len(self.heard), self.num_turns)
        for one, alone in zip(self.heard, undisturbed, strict=True):
            one.check_same(alone)

    def check_nothing_computed_again(self) -> None:
        """Eight tokens and four answers a turn; the very last token goes through the model with what follows it."""
        for one in self.heard:
            assert one.num_computed == [11, *[12] * (self.num_turns - 1)]

    def took_since(self, begun_s: float, ended_s: float) -> float:
        """The longest turn that ended within a time."""
        return max(
            took_s
            for one in self.heard
            for at_s, took_s in one.waited_s
            if begun_s <= at_s - took_s + BEAT_S and at_s < ended_s
        )


@asynccontextmanager
async def clients_of(edges: Sequence[Process]) -> AsyncIterator[list[AsyncClient]]:
    """One that prefers each edge, and knows the others."""
    async with AsyncExitStack() as stack:
        addresses = [edge.address for edge in edges]
        yield [
            await stack.enter_async_context(
                AsyncClient(f"ipv4:{','.join(addresses[first:] + addresses[:first])}", timeout_s=120, recovery=PATIENT)
            )
            for first in range(len(edges))
        ]


def started(cluster: Cluster, num_workers: int, num_edges: int = 2) -> tuple[list[Process], list[Process]]:
    workers = [cluster.start_worker("--grace-s=60") for _ in range(num_workers)]
    edges = [cluster.start_edge() for _ in range(num_edges)]
    for process in workers + edges:
        process.wait_until_ready()
    for edge in edges:
        wait_for_workers(edge, num_workers)
    return workers, edges
