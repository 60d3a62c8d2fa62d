"""Tests of load_tests.fleet.limits: each resource by hand, what breaks first, and how large a cell may be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from load_tests.fleet.fleet import Fleet
from load_tests.fleet.limits import Bounds, Resource, breaks_at, judge, largest_cell, resources
from load_tests.fleet.limits_report import draw_limits, limits_as_json, print_limits

# 1,000 sessions of 1 MB on 20 replicas, 50 on each, which serve 100.
FLEET = Fleet(
    sessions=1000,
    capacity=100,
    headroom=0.5,
    context=1000,
    kv_bytes=1000,
    network_bytes_s=1e6,
    connection_bytes_s=1e6,
    volume_bytes_s=10e6,
    held_s=0.0,
    prefill_tokens_s=1000.0,
    grace_s=102.0,
    ask_s=0.001,
    answer_s=0.003,
    edges=5,
)


def of(fleet: Fleet, name: str, bounds: Bounds | None = None) -> Resource:
    return next(one for one in resources(fleet, bounds) if one.name == name)


@pytest.mark.parametrize(
    ("name", "use", "limit"),
    [
        ("load questions", 8 / 2 * 0.004, 0.1),  # eight every two seconds
        ("look-ups, zone lost", 100 * 0.004, 1.0),  # each of 100 that move is asked for, or asks
        ("one look-up", 19 * 0.001, 0.5),
        ("silent replicas, zone lost", 2, 32),
        ("volume, zone lost", 10.0, 100 / 18 / (1 - 1000 / 18 / 100)),  # 100 MB at 10 MB/s; a second of all time each
        ("streams of an Envoy", 250, 65_536),  # one of five is lost
        ("connections of an Envoy", 250, 20_000),
        ("rollout one by one", 20 * (2 + 50 + 60), 8 * 3600),
        ("addresses of a name", 100 + 20 * 16, 65_535),
        ("drain of a replica", 50, 60),  # a second each; 60 % of the grace time without the notice
        ("filling a joined replica", 45, 300),  # up to nine tenths; the network takes one a second
    ],
)
def test_a_resource_is_what_it_is_by_hand(name: str, use: float, limit: float) -> None:
    assert FLEET.replicas == 20
    one = of(FLEET, name)
    assert (one.use, one.limit) == (pytest.approx(use), pytest.approx(limit))
    assert one.ratio == pytest.approx(use / limit)
    assert one.is_broken == (use > limit)


def test_a_cell_counts_and_not_the_fleet() -> None:
    fleet = replace(FLEET, sessions=100_000, cell_replicas=20)
    assert [one.ratio for one in resources(fleet)] == pytest.approx([one.ratio for one in resources(FLEET)])
    assert of(replace(fleet, cell_replicas=0), "one look-up").ratio > 100 * of(fleet, "one look-up").ratio


def test_a_resource_breaks_at_the_first_size_that_breaks_it() -> None:
    for name in ("look-ups, zone lost", "one look-up", "streams of an Envoy", "volume, zone lost"):
        size = breaks_at(FLEET, name)
        assert size is not None
        assert of(replace(FLEET, sessions=size), name).is_broken
        assert not of(replace(FLEET, sessions=size - 1), name).is_broken
    assert breaks_at(FLEET, "streams of an Envoy") == 4 * 65_536 + 1
    assert breaks_at(FLEET, "load questions") is None  # eight are asked, however many there are


def test_bounds_are_what_is_too_much() -> None:
    assert of(FLEET, "load questions", Bounds(question_share=0.01)).is_broken
    assert of(replace(FLEET, moves_per_minute=0.0), "load questions").use == 0  # nobody asks
    assert of(FLEET, "connections of an Envoy", Bounds(sessions_per_connection=50)).use == 5
    assert of(FLEET, "rollout one by one", Bounds(start_s=0.0, rollout_s=1000.0)).ratio == pytest.approx(1.04)


def test_a_joined_replica_is_filled_as_fast_as_others_find_it() -> None:
    fleet = replace(FLEET, network_bytes_s=1e9)
    name = "filling a joined replica"
    # Of 19 others eight find it at a look: they look again after a second, the others after two.
    assert of(fleet, name).use == pytest.approx(45 / (8 / (8 / 19 * 1 + 11 / 19 * 2)))
    assert of(replace(fleet, sessions=50 * 4), name).use == pytest.approx(45 / 3)  # all three do, once a second
    assert of(replace(fleet, sessions=50 * 10_000), name).use == pytest.approx(45 / 4, rel=0.01)
    assert of(replace(fleet, moves_per_minute=0.0), name).use == 1200 / 5  # new sessions


def test_what_breaks_first_is_named_first() -> None:
    fleet = Fleet(sessions=100_000)
    verdict = judge(fleet)
    sizes = [size for _, size in verdict.broken]
    assert sizes == sorted(sizes)
    assert all(size <= 100_000 for size in sizes)
    assert verdict.broken[0][0].name == "look-ups, zone lost"
    assert list(judge(replace(fleet, cell_replicas=80)).broken) == []
    assert verdict.broken_always == []
    # It does not depend on the size, so cells do not help.
    short = judge(replace(fleet, cell_replicas=80, grace_s=30.0))
    assert [one.name for one in short.broken_always] == ["drain of a replica"]


def test_in_the_largest_cell_nothing_breaks_and_in_a_larger_one_something_does() -> None:
    most = largest_cell(Fleet())
    sessions = most * 126 - 1
    assert not judge(Fleet(sessions=sessions)).broken
    assert judge(Fleet(sessions=sessions + 126)).broken


def test_it_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wholes = [Fleet(sessions=sessions) for sessions in (10_000, 100_000)]
    print_limits(wholes, Fleet(cell_replicas=80))
    told = capsys.readouterr().out
    assert told.count("look-ups, zone lost") == 2  # a row of the uses, and the first to break of one of the fleets
    assert "11,112" in told
    draw_limits(tmp_path / "limits.png", wholes, Fleet(cell_replicas=80))
    assert (tmp_path / "limits.png").read_bytes().startswith(b"\x89PNG")
    told_json = {one["name"]: one for one in limits_as_json(wholes[1])}
    assert told_json["addresses of a name"]["breaks_at_sessions"] == 515_214
    assert told_json["drain of a replica"]["breaks_at_sessions"] is None
