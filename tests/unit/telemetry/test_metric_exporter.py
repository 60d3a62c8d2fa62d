"""Tests of metrics at a collector: the numbers of Triton's page, histograms as histograms, and whose trace was slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from microturn.errors import InvalidArgument
from microturn.sessions.turn import Status, Turn
from microturn.telemetry import otlp
from microturn.telemetry.metric_exporter import MetricExporter
from microturn.telemetry.otlp import find_collector
from support.collector import Collector, running_collector
from support.fake_runner import FakeDriver

TRACE_ID, PARENT_ID = "ab" * 16, "cd" * 8


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(otlp, "_RETRY_PAUSES_S", (0.01, 0.01))
    with running_collector() as collector:
        yield collector


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def exporter(collector: Collector, driver: FakeDriver) -> Iterator[MetricExporter]:
    found = find_collector("metrics", collector.endpoint, {"microturn.model_name": "tiny"})
    assert found is not None
    exporter = MetricExporter(found, driver.engine.recorder.metrics, "tiny")
    yield exporter
    exporter.stop()


def take_turn(driver: FakeDriver, num_tokens: int) -> tuple[Turn, Status]:
    """60 ms until its first token, 30 from there to its last."""
    trace = f"00-{TRACE_ID}-{PARENT_ID}-01"
    answer, turn = driver.post(7, [5, 6], start=True, max_tokens=num_tokens, traceparent=trace)
    driver.clock.now_s += 0.06
    driver.engine.step()
    driver.clock.now_s += 0.03
    driver.run()
    return turn, answer.status


def export(exporter: MetricExporter, driver: FakeDriver, collector: Collector) -> None:
    exporter.put(driver.engine.recorder.metrics.samples())
    collector.wait_for_metrics(bool)


def point_of(collector: Collector, name: str) -> dict[str, Any]:
    """Of a histogram without labels."""
    data = collector.metrics[name]["histogram"]
    assert data["aggregationTemporality"] == 2
    (point,) = data["dataPoints"]
    return point


def test_every_metric_arrives_as_what_it_is(exporter: MetricExporter, driver: FakeDriver, collector: Collector) -> None:
    take_turn(driver, num_tokens=4)
    metrics = driver.engine.recorder.metrics
    exporter.put(metrics.samples())
    collector.wait_for_metrics(bool)
    kinds = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
    for family in metrics:
        sent = collector.metrics[family.name.removesuffix("_total")]
        assert kinds[family.kind] in sent, family.name
        assert len(sent[kinds[family.kind]]["dataPoints"]) == len(family.series)
    turns = collector.metrics["microturn_turns"]["sum"]
    assert (turns["isMonotonic"], turns["aggregationTemporality"]) == (True, 2)
    reasons = {point["attributes"][0]["value"]["stringValue"]: point["asDouble"] for point in turns["dataPoints"]}
    assert reasons == {reason: float(reason == "length") for (reason,) in metrics.turns.series}
    point = point_of(collector, "microturn_turn_seconds")
    assert (point["count"], point["sum"]) == ("1", pytest.approx(0.09))
    assert point["explicitBounds"] == metrics.turn_seconds.bounds
    (bucket,) = [number for number, count in enumerate(point["bucketCounts"]) if count != "0"]
    assert point["explicitBounds"][bucket - 1] < 0.09 <= point["explicitBounds"][bucket]
    assert len(point["bucketCounts"]) == len(point["explicitBounds"]) + 1
    assert collector.metrics["microturn_turn_seconds"]["unit"] == "s"


def test_three_have_the_names_of_the_conventions_and_the_trace_of_a_turn(
    exporter: MetricExporter, driver: FakeDriver, collector: Collector
) -> None:
    exporter.exemplify(*take_turn(driver, num_tokens=4))
    export(exporter, driver, collector)
    for ours, theirs, value in (
        ("microturn_turn_seconds", "gen_ai.server.request.duration", 0.09),
        ("microturn_turn_first_token_seconds", "gen_ai.server.time_to_first_token", 0.06),
        ("microturn_turn_output_token_seconds", "gen_ai.server.time_per_output_token", 0.01),
    ):
        one, other = point_of(collector, ours), point_of(collector, theirs)
        assert one | {"attributes": []} == other | {"attributes": []}
        names = {attribute["key"] for attribute in other["attributes"]}
        assert names == {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}
        (exemplar,) = one["exemplars"]
        assert (exemplar["traceId"], exemplar["spanId"]) == (TRACE_ID, PARENT_ID)
        assert exemplar["asDouble"] == pytest.approx(value)


def test_a_turn_of_one_token_has_no_time_between_two(
    exporter: MetricExporter, driver: FakeDriver, collector: Collector
) -> None:
    exporter.exemplify(*take_turn(driver, num_tokens=1))
    export(exporter, driver, collector)
    point = point_of(collector, "microturn_turn_output_token_seconds")
    assert (point["count"], point["exemplars"]) == ("0", [])


def test_a_turn_that_is_asked_for_again_is_no_exemplar(
    exporter: MetricExporter, driver: FakeDriver, collector: Collector
) -> None:
    """It has no options of its own, and every one of them was an error in the log."""
    trace = f"00-{TRACE_ID}-{PARENT_ID}-01"
    for _ in range(2):
        answer, turn = driver.post(7, [5, 6], start=True, max_tokens=1, turn=0, traceparent=trace)
        driver.run()
    assert answer.status.replayed
    exporter.exemplify(turn, answer.status)
    export(exporter, driver, collector)
    point = point_of(collector, "microturn_turn_seconds")
    assert (point["count"], point["exemplars"]) == ("1", [])


@pytest.mark.parametrize("code", [401, 500])
def test_a_refusal_that_may_pass_does_not_end_the_export(
    exporter: MetricExporter, driver: FakeDriver, collector: Collector, code: int
) -> None:
    collector.answers = [code]
    samples = driver.engine.recorder.metrics.samples()
    exporter.put(samples)
    deadline_s = time.monotonic() + 30
    while collector.answers:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    exporter.put(samples, is_last=True)
    collector.wait_for_metrics(bool)


def test_updates_come_at_their_interval_and_at_the_end(
    exporter: MetricExporter, driver: FakeDriver, collector: Collector
) -> None:
    samples = driver.engine.recorder.metrics.samples()
    exporter.put(samples)
    collector.wait_for_metrics(bool)
    exporter.put(samples)  # too early
    take_turn(driver, num_tokens=1)
    exporter.put(driver.engine.recorder.metrics.samples(), is_last=True)
    exporter.stop()
    assert collector.num_requests == 2
    assert point_of(collector, "microturn_turn_seconds")["count"] == "1"


def test_a_collector_that_takes_spans_alone_is_asked_once(
    exporter: MetricExporter, driver: FakeDriver, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.answers = [404, 200]
    samples = driver.engine.recorder.metrics.samples()
    exporter.put(samples)
    deadline_s = time.monotonic() + 30
    while "takes no metrics" not in caplog.text:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    exporter.put(samples, is_last=True)
    exporter.stop()
    assert collector.num_requests == 1


def test_the_interval_is_a_number(monkeypatch: pytest.MonkeyPatch, collector: Collector, driver: FakeDriver) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "a minute")
    found = find_collector("metrics", collector.endpoint, {})
    assert found is not None
    with pytest.raises(InvalidArgument, match="number of milliseconds, not 'a minute'"):
        MetricExporter(found, driver.engine.recorder.metrics, "tiny")
