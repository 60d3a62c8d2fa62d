"""Tests of load_tests.load.histogram: percentiles are within half a percent, whoever counted the values."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load_tests.load.histogram import Histogram


def histogram_of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


def exact(values: list[float], percent: float) -> float:
    """By the definition: the smallest value that so many percent do not exceed."""
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


@settings(max_examples=100)
@given(
    st.lists(st.floats(min_value=0.01, max_value=600_000), min_size=1, max_size=200),
    st.sampled_from([0, 1, 50, 90, 99, 99.9, 100]),
)
def test_percentiles_are_those_of_a_sorted_list(values: list[float], percent: float) -> None:
    assert histogram_of(values).percentile(percent) == pytest.approx(exact(values, percent), rel=0.0051)


def test_merged_over_workers_they_are_the_same_as_counted_by_one() -> None:
    chance = random.Random(1)
    values = [chance.lognormvariate(4, 1) for _ in range(3000)]
    merged = Histogram()
    for worker in range(3):
        sent = json.dumps(histogram_of(values[worker::3]).as_json())
        merged.merge(Histogram.from_json(json.loads(sent)))
    assert merged.num == 3000
    assert merged.mean == pytest.approx(sum(values) / 3000)
    assert merged.max_ms == max(values)
    for percent in (1, 50, 99, 100):
        assert merged.percentile(percent) == histogram_of(values).percentile(percent)


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    chance = random.Random(1)
    histogram = histogram_of([chance.uniform(0.001, 600_000) for _ in range(20_000)])
    assert len(histogram.as_json()["by"]) < 2100


def test_nothing_counted_is_no_time_at_all() -> None:
    assert Histogram().percentile(99) == 0.0
    assert Histogram().mean == 0.0
    assert histogram_of([0.0]).percentile(50) == pytest.approx(0.001, rel=0.01)


def test_of_an_even_number_the_lower_and_the_upper_median_are_told_apart() -> None:
    histogram = Histogram()
    for value in (10.0, 20.0, 40.0, 80.0):
        histogram.add(value)
    assert histogram.percentile(50) == histogram.at_rank(2) == pytest.approx(20, rel=0.005)
    assert histogram.at_rank(3) == pytest.approx(40, rel=0.005)
    assert histogram.at_rank(9) == histogram.percentile(100) == 80
    assert Histogram().at_rank(1) == 0
