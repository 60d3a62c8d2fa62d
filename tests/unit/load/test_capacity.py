"""Tests of load_tests.load.capacity: what it says about the limit."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from load_tests.load.capacity import limit
from load_tests.load.pictures import draw_capacity, draw_run
from load_tests.load.record import Second


def test_what_took_the_time_of_late_turns_is_named_first() -> None:
    level = {
        "errors": {},
        "late_turn_ms": {"held_up": 0.4, "around": 8.0, "queue": 150.0, "prefill": 40.0, "decode": 90.0},
        "cores_busy": {"server": 1.9, "others_share": 0.01, "num": 2},
    }
    assert limit(level) == (
        "queue (a late turn: queue 150 ms, decode 90 ms, prefill 40 ms, around 8 ms; "
        "1.9 of 2 cores busy for the server)"
    )
    level["cores_busy"] = {"server": 1.0, "others_share": 0.4, "num": 2}
    assert "others used 40% of the machine" in limit(level)
    assert limit({**level, "errors": {"UNAVAILABLE": 3}}) == "errors: {'UNAVAILABLE': 3}"


def test_pictures_are_drawn_also_of_very_little(tmp_path: Path) -> None:
    seen = Second(2, 2, num_due=5, num_on_time=4, num_errors=0, total_ms=500.0, num_turns=5, max_ms=300.0)
    second = {"second": 9, **asdict(seen)}
    idle = {**second, "second": 10, "num_turns": 0, "total_ms": 0.0}
    for seconds in ([], [second, idle]):
        draw_run(tmp_path / "load.png", "beat", seconds)
        assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")
    level = {"num_users": 1, "on_time_share": 1.0, "turn_ms": {"queue": 3.0, "decode": 50.0}}
    draw_capacity(tmp_path / "capacity.png", [level], 0.99)
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
