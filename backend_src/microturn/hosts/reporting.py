"""Exports an engine's telemetry: metrics to its host and a collector, spans to a collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import MicroturnError
from microturn.sessions.turn import Status, Turn
from microturn.settings import Settings
from microturn.telemetry.families import Sample
from microturn.telemetry.log_lines import LogThread
from microturn.telemetry.metric_exporter import MetricExporter
from microturn.telemetry.metrics import Metrics
from microturn.telemetry.otlp import find_collector
from microturn.telemetry.publisher import Publisher
from microturn.telemetry.span_exporter import SpanExporter
from microturn.telemetry.spans import AnsweredTurn, is_sampled


class Reporting:
    """Publishes an engine's metrics, and the spans of sampled turns.

    Args:
        engine: runs in its own thread.
        settings: of the engine.
        log: of this process.
        family_type: `pb_utils.MetricFamily`, or a class like it.
        model: what its host calls the model.
        about: labels of `microturn_info`.
        measure: sets the metrics of the host.

    Raises:
        InvalidArgument: an OpenTelemetry variable is not a URL.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        log: LogThread,
        family_type: Any,
        model: str,
        about: Mapping[str, str],
        measure: Callable[[Metrics], None],
    ) -> None:
        self._engine = engine
        self._measure_host = measure
        self._log = log
        service = {f"microturn.{name}": value for name, value in about.items()}
        traces = find_collector("traces", settings.otlp_endpoint, service)
        self._spans = None if traces is None else SpanExporter(traces, about["model_name"])
        metrics = engine.recorder.metrics
        to = find_collector("metrics", settings.otlp_endpoint, service)
        self._metrics = None if to is None else MetricExporter(to, metrics, about["model_name"])
        self._publisher = Publisher(
            metrics, self._measure, family_type, labels={"model": model}, info=about, exporter=self._metrics
        )

    def answered(self, turn: Turn, answer: Status | MicroturnError, begun_s: float) -> None:
        """A turn's last answer has been sent.

        Args:
            turn: that of the request.
            answer: how it ended.
            begun_s: when sending began, by the engine's clock.
        """
        if not is_sampled(turn):
            return
        if self._spans is not None:
            self._spans.put(AnsweredTurn(turn, answer, begun_s, self._engine.clock()))
        if self._metrics is not None and not isinstance(answer, MicroturnError):
            self._metrics.exemplify(turn, answer)

    def stop(self) -> None:
        """Ends the threads."""
        self._publisher.stop()
        for exporter in (self._spans, self._metrics):
            if exporter is not None:
                exporter.stop()

    def _measure(self) -> dict[Sample, float]:
        metrics = self._engine.recorder.metrics
        self._measure_host(metrics)
        dropped = metrics.telemetry_dropped
        dropped.set(self._log.num_dropped, "log")
        dropped.set(0 if self._spans is None else self._spans.num_dropped, "span")
        return self._engine.call(Maintenance.measure)
