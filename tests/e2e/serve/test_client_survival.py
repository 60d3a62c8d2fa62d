"""Nothing is lost: streams are reset, model processes are killed, a server is replaced by another; the talk goes on.

A tiny model behind the real supervisor, so that what is killed is back in seconds. Whatever happens, the tokens of 200
turns are those of a talk that nobody disturbed.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest

from microturn_client import Client, Recovery, Session, Tokens
from support.cutting_proxy import CuttingProxy
from support.heard import Heard
from support.served import Served, Start

NUM_TURNS = 200
NUM_RESETS = 50
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PATIENT = Recovery(give_up_after_s=120.0)


@pytest.fixture(scope="module")
def served(start_tiny: Start) -> Served:
    server = start_tiny()
    server.wait_until_ready(60)
    return server


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> dict[str, Heard]:
    """The two talks as nobody disturbs them."""
    with opened(served.address) as session, opened(served.address, **SEEDED) as seeded:
        return {"greedy": talk(session), "seeded": talk(seeded)}


@contextmanager
def opened(address: str, recovery: Recovery = PATIENT, **options: object) -> Iterator[Session]:
    with Client(address, timeout_s=120, recovery=recovery) as client, client.session(**options) as session:
        yield session


def talk(session: Session, disturb: Callable[[int, int], None] = lambda _turn, _token: None) -> Heard:
    """Two hundred micro-turns: ids, text that ends in the middle of words, and turns that only append."""
    heard = Heard()
    chance = random.Random("what is said")
    for number in range(NUM_TURNS):
        given: object = (
            chance.choices(range(100, 400), k=3) if number % 3 else f" the quick br{'own fox' * (number % 2)}"
        )
        num_tokens = 0 if number % 5 == 4 else 4
        disturb(number, -1)
        heard.begin_turn()
        for event in session.turn(given, max_tokens=num_tokens, ignore_eos=True):
            heard.take(event)
            if isinstance(event, Tokens):
                disturb(number, len(heard.answers[-1]))
        assert len(heard.answers[-1]) == num_tokens
    return heard


class Moments:
    """Turns and tokens of a talk at which something happens to it; each once, and the later ones not before it.

    Tokens may come several at once, as they do when a turn is asked for again: then a moment is due with the next.
    """

    def __init__(self, *moments: tuple[int, int]) -> None:
        self.left = list(moments)

    def take_due(self, number: int, token: int) -> bool:
        is_due = bool(self.left) and (number, token) >= self.left[0]
        if is_due:
            del self.left[0]
        return is_due


def talk_through_resets(address: str, kind: str) -> Heard:
    chance = random.Random(f"resets {kind}")
    # More than are wanted: where several tokens come at once, some moments never do.
    moments = {(chance.randrange(NUM_TURNS), chance.choice([-1, 1, 2, 3])) for _ in range(3 * NUM_RESETS)}
    with CuttingProxy(address) as proxy:

        def disturb(number: int, token: int) -> None:
            if (number, token) in moments and proxy.num_cut < NUM_RESETS:
                time.sleep(0.003 * chance.random())
                proxy.cut()

        with opened(proxy.address, **(SEEDED if kind == "seeded" else {})) as session:
            heard = talk(session, disturb)
        assert proxy.num_cut >= NUM_RESETS
    return heard


def test_fifty_resets_change_nothing(served: Served, undisturbed: dict[str, Heard]) -> None:
    kinds = list(undisturbed)
    with ThreadPoolExecutor(len(kinds)) as pool:
        for kind, heard in zip(kinds, pool.map(partial(talk_through_resets, served.address), kinds), strict=True):
            heard.check_same(undisturbed[kind])
            assert heard.resumed


def test_a_model_process_that_stands_still_changes_nothing(start_tiny: Start, undisturbed: dict[str, Heard]) -> None:
    """Its turns pile up in Triton, and are asked for again and again, each time on a new stream.

    For less than a second: then Triton finds a model process that has a request not healthy, and it ends.
    """
    server = start_tiny()
    server.wait_until_ready(60)
    moments = Moments((10, -1), (61, 2), (110, 1))

    def disturb(number: int, token: int) -> None:
        if moments.take_due(number, token):
            model = server.model_process()
            model.suspend()
            threading.Timer(0.5, model.resume).start()

    with opened(server.address, Recovery(ask_again_after_s=0.05), **SEEDED) as session:
        heard = talk(session, disturb)
    assert not moments.left
    heard.check_same(undisturbed["seeded"])


def test_five_deaths_change_nothing(served: Served, start_tiny: Start, undisturbed: dict[str, Heard]) -> None:
    """Four times the model process is killed, and its supervisor replaces it; the fifth time another server answers.

    A greedy talk says when; a seeded one goes on beside it, and is hit wherever it is then.
    """
    deaths = Moments((20, 2), (55, -1), (90, 1), (130, 3), (170, 2))
    another = []
    with CuttingProxy(served.address) as proxy:

        def disturb(number: int, token: int) -> None:
            if not deaths.take_due(number, token):
                return
            if not deaths.left:
                another.append(start_tiny())
                served.process.kill()
                another[0].wait_until_ready(60)
                proxy.target = another[0].address
                proxy.cut()
            else:
                served.model_process().kill()

        with (
            opened(proxy.address) as session,
            opened(proxy.address, **SEEDED) as seeded,
            ThreadPoolExecutor(1) as pool,
        ):
            beside = pool.submit(talk, seeded)
            heard = talk(session, disturb)
            heard_beside = beside.result()
        assert len(another) == 1
    heard.check_same(undisturbed["greedy"])
    assert sum("opened anew" in event.reason for _, event in heard.resumed) == 5
    heard_beside.check_same(undisturbed["seeded"])
    assert heard_beside.resumed


def test_branches_of_a_session_that_has_died_have_all_of_it(start_tiny: Start) -> None:
    """Some are asked for while the server is away, others while it is told the session again, or has been."""
    served = start_tiny()
    served.wait_until_ready(60)
    recovery = Recovery(give_up_after_s=120.0, give_up_opening_s=120.0)
    with opened(served.address, recovery, **SEEDED) as session, ThreadPoolExecutor(24) as pool:
        for number in range(30):
            session.turn(f" the quick brown fox {number}", max_tokens=20, ignore_eos=True).wait()
        session.append(" and no")
        served.model_process().kill()
        forks: list[Future[Session]] = []
        while len(forks) < 24:
            time.sleep(0.005 if served.health() == "SERVING" else 0.25)
            forks.append(pool.submit(session.fork))
        branches = [fork.result() for fork in forks]
        said = [[*branch.turn("thing", max_tokens=8, ignore_eos=True)] for branch in (session, *branches)]
        answer, *others = [[i for event in events if isinstance(event, Tokens) for i in event.ids] for events in said]
        assert others == [answer] * len(branches)
        assert {branch.context_len for branch in branches} == {session.context_len}
        assert session.resumed
        for branch in branches:
            branch.close()
