"""Exports an engine's telemetry: metrics to Triton and a collector, spans to a collector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import MicroturnError
from microturn.sessions.turn import Status, Turn
from microturn.settings import Settings
from microturn.telemetry.families import Sample
from microturn.telemetry.log_lines import LogThread
from microturn.telemetry.metric_exporter import MetricExporter
from microturn.telemetry.otlp import find_collector
from microturn.telemetry.publisher import Publisher
from microturn.telemetry.span_exporter import SpanExporter
from microturn.telemetry.spans import AnsweredTurn, is_sampled
from microturn.triton.responses import Responses
from microturn.triton.sequence_slots import SequenceSlots


class Reporting:
    """Publishes an engine's metrics, and the spans of sampled turns.

    Args:
        engine: runs in its own thread.
        settings: of the engine.
        log: of this process.
        family_type: `pb_utils.MetricFamily`.
        model: the model's name in Triton's repository.
        about: labels of `microturn_info`.
        slots: the count of Triton's sequence slots.

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
        slots: SequenceSlots,
    ) -> None:
        self._engine = engine
        self._slots = slots
        self._log = log
        service = {f"microturn.{name}": value for name, value in about.items()}
        traces = find_collector("traces", settings.otlp_endpoint, service)
        self._spans = None if traces is None else SpanExporter(traces, about["model_name"])
        self._responses: Responses | None = None
        metrics = engine.recorder.metrics
        metrics.sequence_slots_limit.set(slots.num_slots)
        to = find_collector("metrics", settings.otlp_endpoint, service)
        self._metrics = None if to is None else MetricExporter(to, metrics, about["model_name"])
        self._publisher = Publisher(
            metrics, self._measure, family_type, labels={"model": model}, info=about, exporter=self._metrics
        )

    def watch(self, responses: Responses) -> None:
        """Sets the responses whose withheld answers are counted."""
        self._responses = responses

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
        metrics.turns_withheld.set(0 if self._responses is None else self._responses.num_withheld)
        for state, num_slots in self._slots.count().items():
            metrics.sequence_slots.set(num_slots, state)
        dropped = metrics.telemetry_dropped
        dropped.set(self._log.num_dropped, "log")
        dropped.set(0 if self._spans is None else self._spans.num_dropped, "span")
        return self._engine.call(Maintenance.measure)
