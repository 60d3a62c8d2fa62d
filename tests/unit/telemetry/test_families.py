"""Tests of families: every series is there from the start, and histograms are as Prometheus wants them."""

from __future__ import annotations

import pytest

from microturn.telemetry.families import Counter, Gauge, Histogram


def test_every_series_is_there_from_the_start() -> None:
    counter = Counter("c_total", "", to=("host", "disk"), ahead=("true", "false"))
    assert len(counter.samples()) == 4
    assert set(counter.samples().values()) == {0}
    counter.add("disk", "true")
    counter.add("disk", "true", by=2)
    assert counter.samples()["c_total", (("to", "disk"), ("ahead", "true"))] == 3
    assert counter.total() == 3


def test_without_labels_there_is_one_number() -> None:
    gauge = Gauge("g", "")
    gauge.set(2.5)
    assert gauge.samples() == {("g", ()): 2.5}


def test_what_no_label_says_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Counter("c_total", "", to=("host",)).add("disk")
    with pytest.raises(AssertionError, match="no"):
        Gauge("g", "").set(1, "disk")


def test_a_histogram_counts_up_to_each_bound_this_one_included() -> None:
    histogram = Histogram("h_seconds", "", [0.1, 0.2, 1], phase=("queue", "decode"))
    for value in (0.1, 0.15, 0.2, 5):
        histogram.observe(value, "queue")
    samples = histogram.samples()
    buckets = [samples["h_seconds_bucket", (("phase", "queue"), ("le", end))] for end in ("0.1", "0.2", "1", "+Inf")]
    assert buckets == [1, 3, 3, 4]
    assert samples["h_seconds_count", (("phase", "queue"),)] == histogram.count("queue") == 4
    assert samples["h_seconds_sum", (("phase", "queue"),)] == pytest.approx(5.45)
    assert samples["h_seconds_count", (("phase", "decode"),)] == 0
