"""Tests of load_tests.fleet: nobody is lost, only sessions of lost replicas move, and their times add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from load_tests.fleet.placement import Ints, Placement
from load_tests.fleet.report import as_json, draw
from load_tests.fleet.simulation import Fleet, Loss, losses_of, missed_beats, simulate

FLEET = Fleet(sessions=5000, capacity=100, session_s=600.0, repair_s=60.0)
ONE = Loss("one", 30, [3])
# Nobody comes or goes, so that all can be counted.
STILL = replace(FLEET, session_s=1e9)


def test_there_are_as_many_replicas_as_the_headroom_wants() -> None:
    assert FLEET.replicas == 72  # 5,000 sessions are 50 full replicas; of 72 they are 69 %
    assert replace(FLEET, sessions=1).replicas == 2


def placed(num_edges: int, num_replicas: int, num_streams: int, capacity: int = 10**6) -> tuple[Placement, Ints]:
    random = np.random.default_rng(0)
    placement = Placement(num_edges, num_replicas, capacity, random)
    return placement, placement.place(random.integers(num_edges, size=num_streams))


def test_of_those_drawn_the_emptiest_is_taken() -> None:
    placement, chosen = placed(1, 100, 10_000)
    load = placement.load()
    assert np.array_equal(load, np.bincount(chosen, minlength=100))
    # By chance alone the fullest would be 30 % above the mean.
    assert load.max() <= 105
    # Edges that count for themselves do nearly as well.
    assert placed(4, 100, 10_000)[0].load().max() <= 112


def test_who_is_lost_or_full_is_not_drawn() -> None:
    placement, _ = placed(2, 20, 0, capacity=50)
    placement.alive[[2, 7]] = False
    edges = np.zeros(900, np.int64)
    chosen = placement.place(edges)
    assert not {2, 7} & set(chosen)
    assert placement.load().max() <= 51  # all that live are full; one more by two at the same instant
    placement.place(edges[:18])  # there is no room: they are somewhere all the same
    assert placement.load().sum() == 918
    placement.end(edges, chosen)
    assert placement.load().sum() == 18


@pytest.mark.parametrize("way", ["tokens", "volume"])
def test_all_sessions_of_a_lost_replica_move_and_no_others(way: str) -> None:
    random = np.random.default_rng(STILL.seed)
    owners = Placement(STILL.edges, STILL.replicas, STILL.capacity, random).place(
        random.integers(STILL.edges, size=STILL.sessions)
    )
    course = simulate(STILL, [ONE, Loss("two", 60, [5, 6])], way, length_s=120)
    first, second = course.moved
    assert set(first.sessions) == set(np.flatnonzero(owners == 3))
    # Since then some of them may be on the two that go next; those that never moved are for certain.
    assert set(np.flatnonzero((owners == 5) | (owners == 6))) <= set(second.sessions)
    assert len(first.pauses_s) == len(first.sessions)
    assert (first.pauses_s > STILL.detect_s).all()
    assert course.waiting[ONE.at_s - 1] == 0
    assert course.waiting[ONE.at_s] == len(first.sessions)


def test_the_load_of_all_replicas_is_all_sessions() -> None:
    course = simulate(STILL, [ONE], "tokens", length_s=100)
    whole = STILL.sessions / STILL.capacity
    assert course.mean_load[ONE.at_s - 1] * STILL.replicas == pytest.approx(whole)
    assert course.mean_load[ONE.at_s] * (STILL.replicas - 1) == pytest.approx(whole)
    assert course.mean_load[ONE.at_s + 60] * STILL.replicas == pytest.approx(whole)
    assert course.peak_load[ONE.at_s] == course.moved[0].peak_load >= course.peak_load[ONE.at_s - 1]


def test_restoring_from_the_volume_takes_what_its_bytes_take() -> None:
    # Two replicas: all go to the other one, one after the other.
    fleet = replace(STILL, sessions=10, capacity=10, headroom=0.5, context=1000, kv_bytes=1000, network_bytes_s=1e6)
    assert fleet.replicas == 2
    moved = simulate(fleet, [replace(ONE, replicas=[1])], "volume", length_s=40).moved[0]
    num = len(moved.sessions)
    assert num > 0
    assert sorted(moved.pauses_s) == pytest.approx([fleet.detect_s + 1.0 * place for place in range(1, num + 1)])
    assert moved.bytes_read == num * 1e6
    assert moved.tokens_computed == 0


def test_computing_again_has_the_time_that_is_left() -> None:
    fleet = replace(STILL, sessions=10, capacity=20, headroom=0.75, context=1000, prefill_tokens_s=4000.0)
    assert fleet.replicas == 2
    drained = Loss("drained", 30, [1], is_drained=True)
    moved = simulate(fleet, [drained], "tokens", length_s=40).moved[0]
    num = len(moved.sessions)
    # Half of the other's time is left: a quarter of a second's work takes half a second.
    assert sorted(moved.pauses_s) == pytest.approx([fleet.drain_s + 0.5 * place for place in range(1, num + 1)])
    assert (moved.bytes_read, moved.tokens_computed) == (0.0, num * 1000)
    full = simulate(replace(fleet, capacity=10, headroom=0.5), [drained], "tokens", length_s=40).moved[0]
    assert max(full.pauses_s) == pytest.approx(fleet.drain_s + 0.25 / fleet.least_share * num)


def test_a_replica_that_comes_back_is_filled_by_who_opens() -> None:
    course = simulate(replace(FLEET, session_s=20.0), [ONE], "tokens", length_s=200)
    assert course.peak_load[-1] < course.peak_load[ONE.at_s + 50] * 1.2
    assert course.moved[0].peak_load > 0


def test_turns_on_too_full_a_replica_are_late() -> None:
    fleet = replace(STILL, headroom=0.0)
    assert simulate(fleet, [], "tokens", length_s=2).late_turns[0] > 0
    assert simulate(replace(STILL, headroom=0.8), [], "tokens", length_s=2).late_turns[0] == 0


def test_beats_that_are_missed_are_counted_up() -> None:
    assert list(missed_beats(FLEET, np.array([0.1, 0.2, 0.21, 2.0]))) == [1, 1, 2, 10]


def test_the_same_seed_is_the_same_run() -> None:
    def told(fleet: Fleet) -> dict[str, object]:
        return as_json(fleet, {way: simulate(fleet, losses_of(fleet), way) for way in ("tokens", "volume")})

    assert told(FLEET) == told(FLEET)
    assert told(FLEET) != told(replace(FLEET, seed=1))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    courses = {way: simulate(FLEET, losses_of(FLEET), way) for way in ("tokens", "volume")}
    draw(tmp_path / "fleet.png", FLEET, courses)
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")
