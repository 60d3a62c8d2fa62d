"""A server is stopped under twenty live sessions and started again: it exits in time, and nobody has lost anything.

When SIGTERM comes, all streams are open: some sessions are in the middle of an answer, which ends while the server
drains or cannot end in time, and the others are silent; half of each sample. Their programs do nothing about it: they
go on with the turn that they have, and with the next ones.
"""

from __future__ import annotations

import asyncio
import json
import queue
import random
import re
import signal
import time
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn_client import AsyncClient, AsyncSession, Recovery, Tokens
from support.cutting_proxy import CuttingProxy
from support.heard import Heard
from support.pipelined import PipelinedStream
from support.raw import RawStream, ids, turn_request
from support.served import Served, Start, sessions_command

NUM_SESSIONS = 20
NUM_TURNS = 4
STOPPED_AT = 2
GRACE_S = 12.0
KUBELET_S = 15.0  # behind the grace time it kills, says the chart; this machine may be slow
# How much the turns generate in which the server is stopped, by session: the first of them outlast any patience, and
# are interrupted by their listeners, who have heard this much.
ENDLESS = 6000
NUM_TOKENS = {0: ENDLESS, 1: ENDLESS, **dict.fromkeys(range(2, 8), 60)}
NUM_HEARD = 30
PATIENT = Recovery(give_up_after_s=120.0)


class Stop:
    """The moment at which the server is stopped.

    Attributes:
        has_reached: the sessions that are where the stop shall find them.
        is_over: the server is back.

    Args:
        happens: whether there is one; else nobody waits for it.
    """

    def __init__(self, *, happens: bool) -> None:
        self.has_reached: set[int] = set()
        self.is_over = asyncio.Event()
        self.happens = happens
        if not happens:
            self.is_over.set()


def sessions_of(client: AsyncClient) -> list[AsyncSession]:
    """They are opened by their first turns."""
    sampling = [{"temperature": 0.9, "seed": which} if which % 2 else {} for which in range(NUM_SESSIONS)]
    return [client.session(**options) for options in sampling]


def said(which: int, number: int) -> list[int]:
    return random.Random(f"{which} {number}").choices(range(100, 400), k=3 + which)


async def talk(session: AsyncSession, which: int, stop: Stop) -> Heard:
    heard = Heard()
    for number in range(NUM_TURNS):
        num_tokens = NUM_TOKENS.get(which, 4) if number == STOPPED_AT else 4
        if number == STOPPED_AT and num_tokens == 4:
            stop.has_reached.add(which)
            await stop.is_over.wait()
        turn = session.turn(said(which, number), max_tokens=num_tokens, ignore_eos=True)
        heard.begin_turn()
        async for event in turn:
            heard.take(event)
            if not isinstance(event, Tokens):
                continue
            if number == STOPPED_AT:
                stop.has_reached.add(which)
            # Behind the stop: what was heard before is computed again first.
            if num_tokens == ENDLESS and len(heard.answers[-1]) >= NUM_HEARD and bool(heard.resumed) == stop.happens:
                status = await session.interrupt(heard_tokens=NUM_HEARD)
                heard.was_cut(NUM_HEARD, status.context_len)
                turn.close()
                break
        if number == STOPPED_AT:
            await stop.is_over.wait()
    return heard


async def test_twenty_sessions_outlive_the_stop_of_their_server(start_tiny: Start, tmp_path: Path) -> None:
    saved, admin_socket = tmp_path / "saved", tmp_path / "admin.sock"
    options = (f"--snapshot-dir={saved}", f"--admin-socket={admin_socket}", f"--grace-s={GRACE_S}")

    def living() -> dict[int, int]:
        """How long the contexts of the server's sessions are."""
        listing = sessions_command(admin_socket, "list", "--json")
        assert listing.returncode == 0, listing.stderr
        return {session["id"]: session["context_len"] for session in json.loads(listing.stdout)}

    async def stop_and_start(first: Served, proxy: CuttingProxy, stop: Stop) -> None:
        while len(stop.has_reached) < NUM_SESSIONS:
            await asyncio.sleep(0.01)
        stopped_s = time.monotonic()
        first.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait_for_exit) == 0
        assert time.monotonic() - stopped_s <= GRACE_S + KUBELET_S
        second = start_tiny(*options)
        await asyncio.to_thread(second.wait_until_ready, 60)
        assert await asyncio.to_thread(living) == {}  # each comes back with its client
        proxy.target = second.address
        stop.is_over.set()

    first = start_tiny(*options)
    first.wait_until_ready(60)
    undisturbed_talks = Stop(happens=False)
    async with AsyncClient(first.address, timeout_s=120, recovery=PATIENT) as client:
        sessions = sessions_of(client)
        talks = [talk(session, which, undisturbed_talks) for which, session in enumerate(sessions)]
        undisturbed = await asyncio.gather(*talks)
        await asyncio.gather(*(session.close() for session in sessions))

    stop = Stop(happens=True)
    with CuttingProxy(first.address) as proxy:
        async with AsyncClient(proxy.address, timeout_s=120, recovery=PATIENT) as client:
            sessions = sessions_of(client)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(stop_and_start(first, proxy, stop))
                disturbed = [
                    tasks.create_task(talk(*one, stop)) for one in zip(sessions, range(NUM_SESSIONS), strict=True)
                ]
            restored = await asyncio.to_thread(living)
    heard = [talk.result() for talk in disturbed]
    for one, expected in zip(heard, undisturbed, strict=True):
        one.check_same(expected)
        assert [event.reason.startswith("the session lives") for _, event in one.resumed] == [True]
    assert len(restored) == NUM_SESSIONS
    assert restored == {session.id: one.context_len for session, one in zip(sessions, heard, strict=True)}
    saved_line, last_line = [line for line in first.said if line.startswith("microturn: ")][-2:]
    # With how many there was time to save the KV is up to the machine.
    assert re.fullmatch(rf"microturn: saved {NUM_SESSIONS} sessions(, \d+ of them with their KV)?", saved_line)
    assert last_line == "microturn: stopped"
    assert [file.suffix for file in saved.iterdir()] == [".claimed"] * NUM_SESSIONS


def test_a_turn_whose_stream_broke_does_not_hold_up_a_stop(start_tiny: Start) -> None:
    """It has a number, so it ran on to its end, and was recorded; who was to send its answer waited for that for ever.

    As long as a request has not had its last response, Triton does not end by itself. One stream alone breaks here:
    Triton keeps requests that were answered quickly in its list of a stream, and uses their memory again, so that a
    second one could cancel the turn of the first.
    """
    served = start_tiny("--grace-s=40")
    served.wait_until_ready(60)
    request = turn_request(7, options={"turn": 1, "max_tokens": 400, "ignore_eos": True}, input_ids=ids(6))
    with RawStream(served.address) as stream:
        assert stream.ask(7, start=True, options={"turn": 0, "max_tokens": 0}, input_ids=ids(5)).error is None
        with PipelinedStream(served.address) as broken:
            assert broken.send(request).has_begun.wait(60)
        closed = stream.ask(7, end=True, options={"turn": 2, "max_tokens": 0}, input_ids=ids())  # behind it
        assert closed.error is None
        assert closed.status is not None
        assert closed.status["context_len"] == 402
    check_stops_early(served)


def test_an_answer_that_nobody_reads_does_not_hold_up_a_stop(start_tiny: Start) -> None:
    """Triton waits for its last response, which finds no room on its way."""
    served = start_tiny("--grace-s=40")
    served.wait_until_ready(60)
    requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
    with grpc.insecure_channel(served.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        unread = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests.get, None))
        options = {"turn": 0, "max_tokens": 400, "ignore_eos": True, "logprobs": 20}
        requests.put(turn_request(7, start=True, options=options, input_ids=ids(6)))
        assert not next(unread).error_message
        with RawStream(served.address) as stream:
            behind = stream.ask(7, options={"turn": 1, "max_tokens": 0}, input_ids=ids())
            assert behind.error is None
        check_stops_early(served)
        requests.put(None)


def check_stops_early(served: Served) -> None:
    """It ends before its grace time of 40 s is over."""
    served.process.send_signal(signal.SIGTERM)
    assert served.wait_for_exit() == 0
    said = [line for line in served.said if line.startswith("microturn: ")]
    assert said[-2:] == ["microturn: stopping, for at most 40 s", "microturn: stopped"]
