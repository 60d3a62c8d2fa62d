"""Sessions on three real servers behind the real Envoy, while one server is stopped, one killed and one added, or a
fourth joins and all are replaced one after the other. The servers hand sessions over to each other by the network.

Each session says something every second. Whatever happens to its server, it hears what it would have heard undisturbed:
every token once, from the whole context.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import time

from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.replicated import BEAT_S, HeardInTime, Replicas, client_of, talk_all, talk_undisturbed, took, wait_for_beat
from support.scrape import scrape

NUM_TURNS = 14
STOPPED_AT, KILLED_AT, ADDED_AT = 2, 7, 10


async def test_sessions_outlive_their_servers(
    replicas: Replicas, edge: Edge, authority: Authority, issuer: TokenIssuer, num_talkers: int
) -> None:
    servers = replicas.start(3)
    undisturbed = await talk_undisturbed(servers[0].address, num_talkers, NUM_TURNS)
    heard = [HeardInTime() for _ in range(num_talkers)]
    stopped, killed, stays = servers
    edge.serve([stopped, killed, stays])
    edge.wait_for_healthy(3)
    begin_s = time.monotonic() + BEAT_S
    is_stopped, is_killed = asyncio.Event(), asyncio.Event()

    async def on_the_beat(number: int) -> bool:
        await wait_for_beat(begin_s, number)
        # However slow the machine: each session speaks between the stop and the kill, and behind the kill.
        if number == KILLED_AT - 1:
            await is_stopped.wait()
        if number == KILLED_AT + 1:
            await is_killed.wait()
        return number < NUM_TURNS

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
        edge.serve([stays, *await asyncio.to_thread(replicas.start, 1)])
        return stopped_s, killed_s

    async with client_of(edge, authority, issuer) as client:
        disturbing = asyncio.create_task(disturb())
        await talk_all([client], heard, on_the_beat)
        stopped_s, killed_s = await disturbing

    for which in range(num_talkers):
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


async def test_one_joins_and_all_are_replaced_and_nothing_is_computed_again(
    replicas: Replicas, edge: Edge, authority: Authority, issuer: TokenIssuer, num_talkers: int
) -> None:
    """Sessions are on three servers; a fourth has as many within a minute. Then a rollout: one after the other is
    stopped, and another takes its place.
    """
    servers = replicas.start(3)
    edge.serve(servers)
    edge.wait_for_healthy(3)
    heard = [HeardInTime() for _ in range(num_talkers)]
    begin_s = time.monotonic() + BEAT_S
    last_turn = 2**30
    moved_by_stop: list[int] = []

    def num_moved() -> int:
        return sum(len(one.resumed) for one in heard)

    def num_sessions() -> list[int]:
        return [int(scrape(server.metrics_url).sum("microturn_sessions")) for server in servers]

    async def on_the_beat(number: int) -> bool:
        await wait_for_beat(begin_s, number)
        return number <= last_turn

    async def join() -> None:
        servers.extend(await asyncio.to_thread(replicas.start, 1))
        edge.serve(servers)
        joined_s = time.monotonic()
        counts = await asyncio.to_thread(num_sessions)
        while max(counts) > 1.15 * num_talkers / 4 or sum(counts) != num_talkers:  # one is counted twice while it moves
            assert time.monotonic() < joined_s + 60, counts
            await asyncio.sleep(0.2)
            counts = await asyncio.to_thread(num_sessions)
        even_s = time.monotonic() - joined_s
        print(f"sessions on each: {counts}, even after {even_s:.1f} s, {num_moved()} sessions moved")

    async def roll_out() -> None:
        for place, old in enumerate(list(servers)):
            num_before = num_moved()
            old.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(old.wait_for_exit, 120) == 0
            (servers[place],) = await asyncio.to_thread(replicas.start, 1)
            edge.serve(servers)
            await asyncio.to_thread(edge.wait_for_healthy, 4)
            moved_by_stop.append(num_moved() - num_before)

    async def join_and_roll_out() -> None:
        nonlocal last_turn
        while any(len(one.context_lens) < 2 for one in heard):
            await asyncio.sleep(0.05)
        try:
            await join()
            await asyncio.to_thread(edge.wait_for_healthy, 4)
            await roll_out()
        finally:
            # So many more that each has spoken since, all of them the same number.
            last_turn = max(len(one.answers) for one in heard) + 2

    async with client_of(edge, authority, issuer) as client:
        disturbing = asyncio.create_task(join_and_roll_out())
        await talk_all([client], heard, on_the_beat)
        await disturbing

    undisturbed = await talk_undisturbed(servers[0].address, len(heard), last_turn + 1)
    for one, alone in zip(heard, undisturbed, strict=True):
        one.check_same(alone)
        # Eight tokens and four answers a turn; the very last token goes through the model with what follows it.
        assert one.num_computed == [11, *[12] * last_turn]
    assert all(moved_by_stop), moved_by_stop
    print(f"moved: {moved_by_stop}; {took(heard)}")
