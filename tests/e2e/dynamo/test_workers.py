"""Sessions on three workers behind two edges, as in tests/e2e/deploy/test_replicas.py on Triton's host behind
Envoy: one joins, and all workers are replaced one after the other; an edge is killed, a worker too, another one frozen.
"""

from __future__ import annotations

import asyncio
import signal
import time

from support.dynamo import Cluster, Process, num_sessions_on, wait_for_workers
from support.dynamo_talk import Talk, started
from support.replicated import took

# Of a worker at Dynamo's discovery.
LEASE_S = 10.0


async def test_one_joins_and_all_are_replaced_and_nothing_is_computed_again(cluster: Cluster, num_talkers: int) -> None:
    workers, edges = started(cluster, 3)
    moved_by_stop: list[int] = []

    def start() -> Process:
        worker = cluster.start_worker("--grace-s=60")
        worker.wait_until_ready()
        return worker

    async def join(talk: Talk) -> None:
        workers.append(await asyncio.to_thread(start))
        joined_s = time.monotonic()
        counts = await asyncio.to_thread(num_sessions_on, workers)
        # A session that moves is counted twice.
        while max(counts) > 1.15 * num_talkers / 4 or sum(counts) != num_talkers:
            assert time.monotonic() < joined_s + 60, counts
            await asyncio.sleep(0.2)
            counts = await asyncio.to_thread(num_sessions_on, workers)
        even_s = time.monotonic() - joined_s
        print(f"sessions on each: {counts}, even after {even_s:.1f} s, {talk.num_resumed} sessions moved")

    async def roll_out(talk: Talk) -> None:
        for place, old in enumerate(list(workers)):
            num_before = talk.num_resumed
            assert await asyncio.to_thread(old.stop) == 0
            workers[place] = await asyncio.to_thread(start)
            moved_by_stop.append(talk.num_resumed - num_before)

    async def join_and_roll_out(talk: Talk) -> None:
        await talk.all_have_heard(2)
        await join(talk)
        await roll_out(talk)

    talk = Talk(num_talkers)
    await talk.run(edges, join_and_roll_out)
    await talk.check_same(workers[0])
    talk.check_nothing_computed_again()
    assert all(moved_by_stop), moved_by_stop
    print(f"moved: {moved_by_stop}; {took(talk.heard)}")


async def test_sessions_outlive_workers_and_edges(cluster: Cluster, num_talkers: int) -> None:
    workers, edges = started(cluster, 3)
    longest_s: dict[str, float] = {}

    async def disturb(talk: Talk) -> None:
        await talk.all_have_heard(2)
        longest_s.update(await talk.lose(edges[0], workers[0], frozen=workers[1]))
        # It stands still for two rounds by now. Beyond its lease it has to make itself known anew.
        await asyncio.sleep(LEASE_S)
        workers[1].process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(wait_for_workers, edges[1], len(workers) + 1)
        await talk.all_have_spoken_again()

    talk = Talk(num_talkers)
    await talk.run(edges, disturb)
    await talk.check_all_there(workers[2])
    print("; ".join(f"{what}: {took_s:.3f} s at most" for what, took_s in longest_s.items()))
