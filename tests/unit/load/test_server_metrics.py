"""Tests of load_tests.load.server_metrics and agreement: what the server says, beside what the client measured."""

from __future__ import annotations

import pytest

from load_tests.load.agreement import compare
from load_tests.load.record import Record
from load_tests.load.server_metrics import Buckets, counts_between, parse
from unit.load.test_record import answered

BEFORE = """
# HELP microturn_turn_seconds a turn
# TYPE microturn_turn_seconds histogram
microturn_turn_seconds_bucket{model="streaming_llm",le="0.1"} 5
microturn_turn_seconds_bucket{model="streaming_llm",le="0.2"} 5
microturn_turn_seconds_bucket{model="streaming_llm",le="+Inf"} 5
microturn_turn_seconds_count{model="streaming_llm"} 5
microturn_turns_total{finish_reason="length",model="streaming_llm"} 5
microturn_sessions{kv="device",model="streaming_llm",state="parked"} 2
nv_inference_count{model="streaming_llm"} 9
"""
AFTER = """
microturn_turn_seconds_bucket{model="streaming_llm",le="0.1"} 55
microturn_turn_seconds_bucket{model="streaming_llm",le="0.2"} 104
microturn_turn_seconds_bucket{model="streaming_llm",le="+Inf"} 105
microturn_turns_total{finish_reason="length",model="streaming_llm"} 105
microturn_turns_total{finish_reason="stop",model="streaming_llm"} 0
microturn_sessions{kv="device",model="streaming_llm",state="parked"} 3
"""


def test_counters_are_what_was_added_and_gauges_what_is_there() -> None:
    assert counts_between(parse(BEFORE), parse(AFTER)) == {
        'microturn_turns_total{finish_reason="length",model="streaming_llm"}': 100,
        'microturn_sessions{kv="device",model="streaming_llm",state="parked"}': 3,
    }


def test_percentiles_of_a_run_are_interpolated_in_what_was_added() -> None:
    buckets = Buckets(parse(BEFORE), parse(AFTER), "microturn_turn_seconds")
    assert buckets.num == 100
    assert buckets.percentile(25) == pytest.approx(0.05)
    assert buckets.percentile(50) == pytest.approx(0.1)
    assert buckets.percentile(99) == pytest.approx(0.2)
    assert buckets.percentile(100) == pytest.approx(0.2)  # all that is known of the last bucket is where it begins


def test_a_server_without_the_histogram_says_nothing() -> None:
    assert Buckets({}, {}, "microturn_turn_seconds").percentile(50) == 0.0


def test_sources_agree_once_what_each_leaves_out_is_added() -> None:
    record = Record()
    for _ in range(100):
        record.answered("Beat", answered(0.15, held_up_s=0.01), 7)
    rows = compare(record.total, (100, 150, 150), None)
    assert [row.source for row in rows] == ["Locust", "client, from sent", "server, status"]
    assert [row.p50_ms for row in rows] == pytest.approx([150, 140, 120], rel=0.01)
    assert [row.left_out_ms for row in rows] == pytest.approx([0, 10, 30], rel=0.01)
    assert all(row.as_json()["agrees"] for row in rows)


def test_a_source_that_tells_another_story_is_found() -> None:
    record = Record()
    for _ in range(100):
        record.answered("Beat", answered(0.15), 7)
    twice = Buckets({}, {'t_bucket{le="0.3"}': 100.0, 't_bucket{le="0.29"}': 0.0}, "t")
    rows = compare(record.total, (100, 150, 300), twice)
    assert [row.as_json()["agrees"] for row in rows] == [False, True, True, False]


def test_without_a_turn_nothing_is_compared() -> None:
    assert compare(Record().total, (0, 0, 0), None) == []
