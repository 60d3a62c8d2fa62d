"""Tests of admin.rebalancer in fleets of 4 to 1,000 servers: who joins has its share within a minute, and no session
moves twice. See `support.rebalanced`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from microturn.errors import ResourceExhausted
from support.rebalanced import SimulatedFleet, send_simulated

SIZES = [4, 25, 100]


@pytest.fixture(autouse=True)
def simulated_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microturn.admin.rebalancer.send_to_peer", send_simulated)


def uneven(number: int, mean: int) -> list[int]:
    """As the edge places sessions: within a few per cent of each other."""
    spread = mean // 30
    return [mean + random.Random(which).randint(-spread, spread) for which in range(number)]


def check_even(fleet: SimulatedFleet, joined: Sequence[int], needed: float) -> None:
    """All have their share, without more moves than that takes."""
    counts = [len(one.sessions) for one in fleet.replicas]
    assert fleet.peak <= 1.15 * fleet.mean
    assert min(counts[which] for which in joined) >= 0.85 * fleet.mean
    assert max(fleet.num_moves.values()) == 1
    assert sum(fleet.num_moves.values()) <= 1.2 * needed


@pytest.mark.parametrize(
    ("num_replicas", "mean"), [*((number, mean) for number in SIZES for mean in (20, 126)), (1000, 126)]
)
def test_who_joins_has_its_share_within_a_minute(num_replicas: int, mean: int) -> None:
    fleet = SimulatedFleet(uneven(num_replicas - 1, mean))
    fleet.add()
    fleet.run(60)
    check_even(fleet, [num_replicas - 1], fleet.mean)
    before = fleet.num_moves.copy()
    fleet.run(60)
    assert sum((fleet.num_moves - before).values()) <= 0.02 * fleet.mean


@pytest.mark.parametrize("num_replicas", SIZES)
def test_what_is_even_stays(num_replicas: int) -> None:
    fleet = SimulatedFleet(uneven(num_replicas, 126))
    fleet.run(60)
    assert not fleet.num_moves


@pytest.mark.parametrize("num_replicas", [25, 100, 1000])
def test_a_zone_that_comes_back_has_its_share(num_replicas: int) -> None:
    """Each of many that join is found by others."""
    num_lost = num_replicas // 10
    fleet = SimulatedFleet(uneven(num_replicas - num_lost, 126))
    for _ in range(num_lost):
        fleet.add()
    fleet.run(60)
    check_even(fleet, range(num_replicas - num_lost, num_replicas), num_lost * fleet.mean)


@pytest.mark.parametrize("num_replicas", SIZES)
@pytest.mark.parametrize(("few", "many"), [(16, 24), (100, 152)])
def test_many_that_have_too_many_do_not_all_choose_the_same(num_replicas: int, few: int, many: int) -> None:
    num_full = num_replicas // 2
    fleet = SimulatedFleet([many] * num_full + [few] * (num_replicas - num_full))
    fleet.run(60)
    check_even(fleet, range(num_full, num_replicas), num_full * (many - few) / 2)
    assert max(count for one in fleet.replicas[num_full:] for _, count in one.counted) <= 1.15 * fleet.mean


@pytest.mark.parametrize("num_replicas", SIZES)
def test_one_that_has_too_many_hands_over_what_it_may(num_replicas: int) -> None:
    fleet = SimulatedFleet([*uneven(num_replicas - 1, 100), 140])
    fleet.run(60)
    check_even(fleet, range(num_replicas), 140 - fleet.mean + 5)


def test_a_server_of_another_size_gets_as_large_a_share() -> None:
    fleet = SimulatedFleet([80] * 9)
    fleet.add(max_sessions=360)
    fleet.run(90)
    counts = [len(one.sessions) for one in fleet.replicas]
    assert 0.85 * 720 * 2 / 11 <= counts[-1] <= 1.02 * 720 * 2 / 11
    assert max(counts[:-1]) <= 1.15 * 720 / 11
    assert max(fleet.num_moves.values()) == 1


@pytest.mark.parametrize("num_replicas", [4, 100])
def test_one_that_takes_nothing_does_not_keep_the_others_from_theirs(num_replicas: int) -> None:
    fleet = SimulatedFleet(uneven(num_replicas - 2, 126))
    fleet.add().refuses = ResourceExhausted("no room for its KV")
    fleet.add()
    fleet.run(100)
    assert len(fleet.replicas[-1].sessions) >= 0.85 * fleet.mean
    assert fleet.num_refused < 100 * num_replicas / 4


def test_one_that_leaves_gets_nothing_and_gives_nothing() -> None:
    fleet = SimulatedFleet([100] * 9)
    joined = fleet.add()
    fleet.run(8)
    joined.is_leaving = True
    there = len(joined.sessions)
    fleet.run(30)
    assert 0 < there <= len(joined.sessions) <= there + 9  # on their way


@pytest.mark.parametrize(("num_replicas", "mean"), [(4, 20), (80, 126)])
def test_few_move_while_sessions_come_and_go(num_replicas: int, mean: int) -> None:
    """Of 20 minutes each; a new one goes to the emptiest of five, as the edge has it."""
    fleet = SimulatedFleet(uneven(num_replicas, mean), max_sessions=mean * 10 // 7)

    def renew() -> None:
        fleet.end(fleet.random.choices(fleet.replicas, [len(one.sessions) for one in fleet.replicas])[0])
        drawn = fleet.random.choices(fleet.replicas, k=5)
        fleet.open(min(drawn, key=lambda one: len(one.sessions)))
        fleet.at(fleet.now_s + 1200 / (num_replicas * mean), renew)

    renew()
    fleet.run(60)
    num_sessions = num_replicas * mean
    print(f"{sum(fleet.num_moves.values()) / num_sessions:.2%} of all sessions in a minute")
    assert sum(fleet.num_moves.values()) <= max(3, 0.005 * num_sessions)
