"""Tests of the publisher, against families that keep what they are told, as Triton's do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from microturn.errors import Unavailable
from microturn.telemetry import publisher
from microturn.telemetry.metrics import Metrics
from microturn.telemetry.publisher import Publisher


class Families:
    """`pb_utils.MetricFamily`: a counter only rises, and a metric is told by name and labels."""

    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.kinds: dict[str, str] = {}
        self.updated: list[str] = []
        self.was_updated = threading.Condition()

    def __call__(self, name: str, description: str, kind: str) -> Any:
        assert name not in self.kinds, "a family that is there already"
        assert description
        self.kinds[name] = kind
        family = self

        class Metric:
            def __init__(self, labels: Mapping[str, str]) -> None:
                self._key = name, tuple(sorted(labels.items()))
                assert self._key not in family.numbers, "a metric that is there already"
                family.numbers[self._key] = 0.0

            def increment(self, by: float) -> None:
                assert kind == "counter"
                assert by > 0, "Triton refuses it"
                self._set(family.numbers[self._key] + by)

            def set(self, value: float) -> None:
                assert kind == "gauge"
                self._set(value)

            def _set(self, value: float) -> None:
                with family.was_updated:
                    family.numbers[self._key] = value
                    family.updated.append(name)
                    family.was_updated.notify_all()

        return type("Family", (), {"Metric": staticmethod(Metric)})()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.was_updated:
            assert self.was_updated.wait_for(condition, timeout=30)


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Families:
    monkeypatch.setattr(publisher, "PERIOD_S", 0.01)
    return Families()


LABELS = {"model": "m"}


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted({**LABELS, **labels}.items()))


def test_numbers_arrive_and_only_what_has_changed_travels(families: Families) -> None:
    metrics = Metrics()
    started = Publisher(metrics, metrics.samples, families, LABELS, info={"model_name": "n"})
    assert families.numbers[key("microturn_info", model_name="n")] == 1
    num_before = len(families.updated)
    metrics.turns.add("length", by=3)
    metrics.sessions_limit.set(7)
    metrics.turn_seconds.observe(0.15)
    families.wait_for(lambda: families.numbers[key("microturn_turn_seconds_count")] == 1)
    families.wait_for(lambda: families.numbers[key("microturn_sessions_limit")] == 7)
    metrics.turns.add("length")
    families.wait_for(lambda: families.numbers[key("microturn_turns_total", finish_reason="length")] == 4)
    started.stop()
    assert families.numbers[key("microturn_turn_seconds_bucket", le="0.141")] == 0
    assert families.numbers[key("microturn_turn_seconds_bucket", le="0.154")] == 1
    assert families.numbers[key("microturn_turn_seconds_bucket", le="+Inf")] == 1
    num_buckets = sum(number > 0 for (name, _), number in families.numbers.items() if name.endswith("_bucket"))
    assert len(families.updated) == num_before + num_buckets + 2 + 2 + 1, "buckets, sum and count, two turns, a limit"


def test_figures_are_out_before_the_time_at_which_they_were_read(families: Families) -> None:
    """Whoever sees that time sees figures as new, though they are published one after another."""
    metrics = Metrics()
    metrics.heartbeat.set(7)
    metrics.input_bytes.set(5)
    metrics.turn_seconds.observe(0.15)
    started = Publisher(metrics, metrics.samples, families, LABELS, info={})
    started.stop()
    assert families.updated[-1] == "microturn_heartbeat_timestamp_seconds"
    assert len(families.updated) > 5


def test_the_last_figures_of_an_engine_that_has_stopped_are_published(families: Families) -> None:
    metrics = Metrics()

    def read() -> Any:
        metrics.sessions_ended.add("failed")
        raise Unavailable("the engine has stopped")

    started = Publisher(metrics, read, families, LABELS, info={})
    families.wait_for(lambda: families.numbers[key("microturn_sessions_ended_total", reason="failed")] == 1)
    started.stop()
    assert metrics.sessions_ended.total() == 1, "it does not ask again"


def test_who_cannot_be_published_once_is_tried_again(families: Families, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    troubles = [RuntimeError("Triton is busy")]

    def read() -> Any:
        if troubles:
            raise troubles.pop()
        metrics.turns.values["stop",] = 1
        return metrics.samples()

    started = Publisher(metrics, read, families, LABELS, info={})
    families.wait_for(lambda: families.numbers[key("microturn_turns_total", finish_reason="stop")] == 1)
    started.stop()
    assert "metrics could not be published" in caplog.text
