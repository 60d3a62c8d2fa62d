"""Sixty sessions on three workers behind two edges, as in tests/e2e/deploy/test_replicas.py on Triton's host behind
Envoy: all workers are replaced one after the other; one is stopped, one killed, one frozen, an edge killed; one joins.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from microturn_client import AsyncClient
from support.dynamo import Cluster, Process, num_sessions_on, wait_for_workers
from support.replicated import BEAT_S, PATIENT, HeardInTime, talk_all, talk_undisturbed, took, wait_for_beat

NUM_SESSIONS = 60
# Of a worker at Dynamo's discovery.
LEASE_S = 10.0

Disturb = Callable[["Talk"], Awaitable[None]]


class Talk:
    """Sixty sessions on a beat, until `end`."""

    def __init__(self) -> None:
        self.heard = [HeardInTime() for _ in range(NUM_SESSIONS)]
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

    async def before_turn(self, number: int) -> bool:
        await wait_for_beat(self._begin_s, number)
        return number <= self._last_turn

    async def run(self, edges: Sequence[Process], disturb: Disturb) -> None:
        async with clients_of(edges) as clients:
            disturbing = asyncio.create_task(disturb(self))
            disturbing.add_done_callback(lambda _: self.end())
            await talk_all(clients, self.heard, self.before_turn)
            await disturbing

    async def check_same(self, worker: Process) -> None:
        """Each has heard what it hears on this worker alone."""
        undisturbed = await talk_undisturbed(worker.address, NUM_SESSIONS, self.num_turns)
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


async def test_all_workers_are_replaced_and_nothing_is_computed_again(cluster: Cluster) -> None:
    workers, edges = started(cluster, 3)
    moved_by_stop: list[int] = []

    async def roll_out(talk: Talk) -> None:
        await talk.all_have_heard(2)
        for place, old in enumerate(list(workers)):
            num_before = talk.num_resumed
            assert await asyncio.to_thread(old.stop) == 0
            workers[place] = cluster.start_worker("--grace-s=60")
            await asyncio.to_thread(workers[place].wait_until_ready)
            moved_by_stop.append(talk.num_resumed - num_before)

    talk = Talk()
    await talk.run(edges, roll_out)
    await talk.check_same(workers[0])
    talk.check_nothing_computed_again()
    assert all(moved_by_stop), moved_by_stop
    print(f"moved: {moved_by_stop}; {took(talk.heard)}")


async def test_sessions_outlive_workers_and_edges(cluster: Cluster) -> None:
    workers, edges = started(cluster, 3)
    longest_s: dict[str, float] = {}

    async def disturb(talk: Talk) -> None:
        async def after(what: str, act: Callable[[], None]) -> None:
            await talk.all_have_spoken_again()
            num_before, begun_s = talk.num_resumed, time.monotonic()
            act()
            await talk.all_have_spoken_again()
            await talk.all_have_spoken_again()
            longest_s[what] = talk.took_since(begun_s, time.monotonic())
            assert talk.num_resumed > num_before, f"nothing was on the one that was {what}"

        await talk.all_have_heard(2)
        await after("edge killed", edges[0].kill)
        await after("worker killed", workers[0].kill)
        frozen_s = time.monotonic()
        await after("worker frozen", lambda: workers[1].process.send_signal(signal.SIGSTOP))
        # Beyond its lease it has to make itself known anew.
        await asyncio.sleep(frozen_s + LEASE_S + 2 - time.monotonic())
        workers[1].process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(wait_for_workers, edges[1], len(workers) + 1)
        await talk.all_have_spoken_again()

    talk = Talk()
    await talk.run(edges, disturb)
    await talk.check_same(workers[2])
    for one in talk.heard:
        assert one.context_lens == [12 * n + 12 for n in range(talk.num_turns)]
    print("; ".join(f"{what}: {took_s:.3f} s at most" for what, took_s in longest_s.items()))


async def test_a_worker_that_joins_gets_its_share(cluster: Cluster) -> None:
    workers, edges = started(cluster, 3)
    even_after_s = 0.0

    async def join(talk: Talk) -> None:
        nonlocal even_after_s
        await talk.all_have_heard(2)
        workers.append(cluster.start_worker("--grace-s=60"))
        await asyncio.to_thread(workers[-1].wait_until_ready)
        joined_s = time.monotonic()
        counts = await asyncio.to_thread(num_sessions_on, workers)
        # A session that moves is counted twice.
        while max(counts) > 1.15 * NUM_SESSIONS / 4 or sum(counts) != NUM_SESSIONS:
            assert time.monotonic() < joined_s + 60, counts
            await asyncio.sleep(0.2)
            counts = await asyncio.to_thread(num_sessions_on, workers)
        even_after_s = time.monotonic() - joined_s
        print(f"sessions on each: {counts}")

    talk = Talk()
    await talk.run(edges, join)
    await talk.check_same(workers[0])
    talk.check_nothing_computed_again()
    print(f"even after {even_after_s:.1f} s, {talk.num_resumed} sessions moved; {took(talk.heard)}")
