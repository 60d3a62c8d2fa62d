"""Tests of load_tests.fleet: nobody is lost, only sessions of lost replicas move, and their times add up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from load_tests.fleet.fleet import Fleet, Loss, losses_of
from load_tests.fleet.placement import Ints, Placement
from load_tests.fleet.report import as_json, draw
from load_tests.fleet.simulation import missed_beats, simulate

FLEET = Fleet(sessions=5000, capacity=100, session_s=600.0, repair_s=60.0)
ONE = Loss("one", 30, [3])
# Nobody comes or goes, or is moved to an emptier replica, so that all can be counted; look-ups cost nothing.
STILL = replace(FLEET, session_s=1e9, moves_per_minute=0.0, ask_s=0.0, answer_s=0.0)
DRAINED = Loss("drained", 30, [1], is_drained=True)


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
    killed = Loss("killed", 30, [1])
    moved = simulate(fleet, [killed], "tokens", length_s=40).moved[0]
    num = len(moved.sessions)
    # Half of the other's time is left: a quarter of a second's work takes half a second.
    assert sorted(moved.pauses_s) == pytest.approx([fleet.detect_s + 0.5 * place for place in range(1, num + 1)])
    assert (moved.bytes_read, moved.tokens_computed) == (0.0, num * 1000)
    full = simulate(replace(fleet, capacity=10, headroom=0.5), [killed], "tokens", length_s=40).moved[0]
    assert max(full.pauses_s) == pytest.approx(fleet.detect_s + 0.25 / fleet.least_share * num)


def test_who_resumes_waits_for_all_others_of_the_cell() -> None:
    fleet = replace(STILL, ask_s=0.01, answer_s=0.02, prefill_tokens_s=1e12)
    moved = simulate(fleet, [ONE], "tokens", length_s=40).moved[0]
    num, others = len(moved.sessions), fleet.replicas - 2
    # Of 72 one is lost and one asks; it answers for every session that moved meanwhile.
    assert min(moved.pauses_s) >= fleet.detect_s + others * 0.01 + 0.02
    # The last of a replica waits for those of its own before it, too.
    of_its_own = (max(moved.pauses_s) - fleet.detect_s - num * 0.02) / (others * 0.01)
    assert of_its_own == pytest.approx(round(of_its_own), abs=1e-3)
    assert 2 <= of_its_own <= 4
    silent = simulate(fleet, [replace(ONE, is_silent=True)], "tokens", length_s=40).moved[0]
    later_s = fleet.frozen_s - fleet.detect_s + fleet.forget_s
    assert sorted(silent.pauses_s) == pytest.approx(sorted(moved.pauses_s + later_s))
    in_cells = simulate(replace(fleet, cell_replicas=12), [ONE], "tokens", length_s=40).moved[0]
    assert max(in_cells.pauses_s) < min(moved.pauses_s) + len(in_cells.sessions) * 0.02


def test_a_drained_replica_hands_over_one_after_the_other_to_the_emptiest() -> None:
    # 1 MB at 10 MB/s and nothing besides: ten a second.
    fleet = replace(STILL, context=1000, kv_bytes=1000, connection_bytes_s=1e7, held_s=0.0, handed_turn_s=0.03)
    course = simulate(fleet, [replace(DRAINED, replicas=[3])], "tokens", length_s=80)
    moved = course.moved[0]
    num = len(moved.sessions)
    assert moved.num_handed_over == num == len(set(moved.sessions)) > 50
    assert (moved.bytes_read, moved.tokens_computed) == (0.0, 0)
    assert sorted(np.bincount(moved.begins_s.astype(int)))[-6:] == [10] * 6
    assert moved.begins_s.min() == fleet.drain_notice_s
    assert np.median(moved.pauses_s) == pytest.approx(fleet.handed_turn_s, abs=0.01)
    assert moved.pauses_s.max() <= fleet.handed_turn_most_s
    assert missed_beats(fleet, moved.pauses_s).max() == 0
    assert moved.peak_load <= course.peak_load[29] + 0.011
    assert course.num_serving[DRAINED.at_s + 3] == fleet.replicas  # it serves those that are still there
    assert course.num_serving[DRAINED.at_s + 20] == fleet.replicas - 1


def test_what_a_drain_has_no_time_for_is_restored() -> None:
    # Half a second each, for 60 % of ten seconds.
    fleet = replace(STILL, context=1000, kv_bytes=1000, connection_bytes_s=2e6, held_s=0.0, grace_s=12.0)
    assert fleet.hand_over_s == 0.5
    assert fleet.drain_s == pytest.approx(6.0)
    for way in ("tokens", "volume"):
        moved = simulate(fleet, [replace(DRAINED, replicas=[3])], way, length_s=80).moved[0]
        assert moved.num_handed_over == 12
        others = len(moved.sessions) - 12
        assert moved.tokens_computed == (others * 1000 if way == "tokens" else 0)
        assert moved.bytes_read == (others * 1e6 if way == "volume" else 0.0)
        assert moved.done_s > fleet.drain_notice_s + fleet.drain_s


def test_a_fourth_server_has_its_share_as_soon_as_the_real_one() -> None:
    # 60 sessions on three, which one joins: 15 each after 10 to 15 s (tests/e2e/deploy/test_replicas.py).
    fleet = replace(
        STILL, sessions=60, capacity=20, headroom=0.25, kv_bytes=12_000, moves_per_minute=60.0, repair_s=20.0
    )
    assert fleet.replicas == 4
    course = simulate(fleet, [replace(ONE, at_s=10)], "tokens", length_s=60)
    assert course.peak_load[29] == 1.0
    assert list(course.rebalanced[10:35]) == [0.0] * 25  # until the edge knows it
    assert course.peak_load[45] * 20 <= 16
    assert 13 <= course.rebalanced[35:].sum() <= 15
    assert simulate(replace(fleet, moves_per_minute=0.0), [replace(ONE, at_s=10)], "tokens", 60).peak_load[45] == 1.0


def test_each_that_is_back_receives_as_its_network_permits() -> None:
    fleet = replace(STILL, moves_per_minute=60.0, context=1000, kv_bytes=1000, network_bytes_s=2e6)
    zone = Loss("zone", 10, range(0, 72, 10))
    course = simulate(fleet, [zone], "volume", length_s=200)
    assert 13 < course.rebalanced[76:106].mean() <= 8 * 2
    assert 0.8 < course.rebalanced.sum() / (fleet.sessions * 8 / 72) <= 1  # up to nine tenths, and what is uneven


def test_a_replica_that_comes_back_is_filled_by_who_opens() -> None:
    fleet = replace(FLEET, session_s=20.0, moves_per_minute=0.0)
    course = simulate(fleet, [ONE], "tokens", length_s=200)
    assert course.peak_load[-1] < course.peak_load[ONE.at_s + 50] * 1.2
    assert course.moved[0].peak_load > 0


def test_turns_on_too_full_a_replica_are_late() -> None:
    fleet = replace(STILL, headroom=0.0)
    assert simulate(fleet, [], "tokens", length_s=2).late_turns[0] > 0
    assert simulate(replace(STILL, headroom=0.8), [], "tokens", length_s=2).late_turns[0] == 0


def test_a_turn_that_is_answered_within_its_beat_is_not_missed() -> None:
    assert list(missed_beats(FLEET, np.array([0.1, 0.2, 0.21, 2.0]))) == [0, 1, 1, 10]


def test_cells_are_all_replicas_and_all_sessions() -> None:
    fleet = replace(STILL, cell_replicas=20)
    assert [len(cell) for cell in fleet.cells] == [18, 18, 18, 18]
    assert [len(cell) for cell in replace(fleet, cell_replicas=50).cells] == [36, 36]
    assert [len(cell) for cell in replace(fleet, cell_replicas=0).cells] == [72]
    zone = Loss("zone", 30, range(0, 72, 10))
    course = simulate(fleet, [ONE, replace(zone, at_s=60)], "tokens", length_s=100)
    whole = fleet.sessions / fleet.capacity
    assert course.mean_load[29] * 72 == pytest.approx(whole)
    assert list(course.num_serving[[29, 30, 61]]) == [72, 71, 63]
    assert course.mean_load[61] * 63 == pytest.approx(whole)
    one, lost = course.moved
    assert len(set(lost.sessions)) == len(lost.sessions) == len(lost.pauses_s) == course.waiting[60]
    assert lost.peak_load >= one.peak_load
    # Who was on replica 3 is now on the 17 others of its cell: they are fuller than the other cells.
    assert one.peak_load * 100 >= len(one.sessions) / 17 + 69
    assert replace(zone, replicas=[40, 41, 60]).within(fleet.cells[2]) == replace(zone, replicas=[4, 5])
    assert zone.within(range(1, 10)) is None


def test_the_same_seed_is_the_same_run() -> None:
    def told(fleet: Fleet) -> dict[str, object]:
        return as_json(fleet, {way: simulate(fleet, losses_of(fleet), way) for way in ("tokens", "volume")})

    assert told(FLEET) == told(FLEET)
    assert told(FLEET) != told(replace(FLEET, seed=1))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    drawn = [
        (fleet, {way: simulate(fleet, losses_of(fleet), way) for way in ("tokens", "volume")})
        for fleet in (FLEET, replace(FLEET, cell_replicas=30))
    ]
    for name, parts in (("both", drawn), ("one", drawn[:1])):
        draw(tmp_path / f"{name}.png", parts)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
