"""Tests of load_tests.load.record, thresholds and report: nothing that was late or failed may be left out."""

from __future__ import annotations

import json

import pytest

from load_tests.load.record import Answered, Record
from load_tests.load.report import report, summary
from load_tests.load.thresholds import Thresholds
from microturn_client import Status, Timing, Usage


def answered(latency_s: float, *, held_up_s: float = 0.0, deadline_s: float | None = 0.2) -> Answered:
    """A turn that took 20 ms around the engine, and there the same in queue and decode."""
    server_ms = (latency_s - held_up_s) * 1e3 - 20
    timing = Timing(queue=server_ms / 2, restore=0.0, prefill=0.0, decode=server_ms / 2, total=server_ms)
    status = Status("length", None, 1, 8, 8, Usage(4, 4, 8, 0), timing, 60.0, 1)
    return Answered(10.0, 10.0 + held_up_s, 10.0 + held_up_s + 0.01, 10.0 + latency_s, deadline_s, status)


def test_a_turns_parts_add_up_to_its_latency() -> None:
    turn = answered(0.3, held_up_s=0.1)
    assert turn.parts_ms == pytest.approx(
        {"held_up": 100, "around": 20, "queue": 90, "restore": 0, "prefill": 0, "decode": 90}
    )
    assert sum(turn.parts_ms.values()) == pytest.approx(turn.latency_ms) == 300


def test_the_share_on_time_counts_failures_and_turns_without_an_answer() -> None:
    record = Record()
    record.answered("Beat", answered(0.1), 7)
    record.answered("Beat", answered(0.25), 7)
    record.failed("Beat", "UNAVAILABLE", 8, had_deadline=True)
    record.given_up("Beat", 0.3, 0.2, 9)
    record.given_up("Beat", 0.1, 0.2, 9)  # it might have been on time
    seen = record.total
    assert (seen.counts["due"], seen.counts["on_time"], seen.counts["given_up"]) == (4, 1, 1)
    assert seen.errors == {"UNAVAILABLE": 1}
    assert seen.times["turn"].num == 3
    assert seen.times["turn_sent"].num == 2
    assert record.seconds[9].max_ms == pytest.approx(300)
    assert seen.late_ms["queue"] == pytest.approx(115)


def test_without_a_deadline_nothing_is_late() -> None:
    record = Record()
    record.answered("Chat", answered(9.0, deadline_s=None), 7)
    assert record.total.counts["due"] == 0
    assert Thresholds().missed(record.total) == []


def test_records_of_workers_add_up_to_one() -> None:
    together, merged = Record(), Record()
    for worker in range(3):
        own = Record()
        for record in (own, together):
            record.answered("Beat", answered(0.1 * (worker + 1)), 7 + worker)
            record.failed("Churn", "EXPIRED", 7, had_deadline=False)
            record.opened("Churn", 50.0)
            record.seconds[7].num_sessions += worker
        merged.merge(Record.from_json(json.loads(json.dumps(own.take()))))
        assert own == Record()
    assert merged.seconds == together.seconds
    assert merged.seconds[7].num_sessions == 3
    assert merged.take() == together.take()


def test_a_run_without_an_answer_has_failed_whatever_it_may_miss() -> None:
    record = Record()
    anything = Thresholds(min_on_time=0.0, max_errors=1.0)
    assert anything.missed(record.total) == ["no turn was answered (0 errors)"]
    record.failed("Beat", "UNAVAILABLE", 7, had_deadline=True)
    assert anything.missed(record.total) == ["no turn was answered (1 errors)"]


def test_each_threshold_is_held_against_what_was_seen() -> None:
    record = Record()
    for _ in range(99):
        record.answered("Beat", answered(0.1), 7)
    assert Thresholds(max_p99_ms=110).missed(record.total) == []
    record.answered("Beat", answered(0.4), 7)
    assert Thresholds(min_on_time=0.99).missed(record.total) == []
    assert len(Thresholds(min_on_time=0.995).missed(record.total)) == 1
    assert len(Thresholds(max_p99_ms=90).missed(record.total)) == 1
    record.failed("Beat", "INTERNAL", 7, had_deadline=False)
    assert Thresholds(max_errors=0.01).missed(record.total) == []
    (missed,) = Thresholds(max_errors=0.0).missed(record.total)
    assert "1 INTERNAL" in missed


def test_a_late_turn_is_the_mean_of_those_that_were_answered_late() -> None:
    """Turns that failed or were given up have no parts, and made it shorter than any of them was."""
    record = Record()
    for latency_s in (0.3, 0.5):
        record.answered("Beat", answered(latency_s), 7)
    record.given_up("Beat", 1.0, 0.2, 7)
    record.failed("Beat", "UNAVAILABLE", 7, had_deadline=True)
    assert sum(summary(record.total)["late_turn_ms"].values()) == pytest.approx(400)


def test_the_report_can_be_written_and_says_with_how_many_people_turns_were_on_time() -> None:
    record = Record()
    for num_users, latency_s in ((1, 0.1), (2, 0.1), (2, 0.3)):
        record.answered("Beat", answered(latency_s), num_users)
        record.seconds[num_users].num_users = num_users
    written = json.loads(json.dumps(report(record, Thresholds(), ["late"], [], {"microturn_turns_total{}": 3.0})))
    assert written["passed"] is False
    assert written["by_users"] == {"1": {"due": 1, "on_time": 1.0}, "2": {"due": 2, "on_time": 0.5}}
    assert written["scenarios"]["Beat"]["ms"]["turn"]["num"] == 3
    assert written["total"]["late_turn_ms"]["around"] == 20
    assert [second["second"] for second in written["seconds"]] == [1, 2]
