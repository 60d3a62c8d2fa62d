"""Exports all metrics to an OpenTelemetry collector, histograms as what they are, with exemplars.

Triton's page has the buckets of histograms as counters (see `publisher`), and no exemplars. Names are those of that
page; three histograms go out under the names of OpenTelemetry's conventions for generative AI too (`gen_ai.server.…`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from microturn.errors import InvalidArgument
from microturn.sessions.turn import Status, Turn
from microturn.telemetry.batch_thread import BatchThread
from microturn.telemetry.families import Family, Histogram, Sample
from microturn.telemetry.latencies import latencies_of
from microturn.telemetry.metrics import Metrics
from microturn.telemetry.otlp import PATIENCE_S, Collector, attributes_of, has_no_place_for_it, nanoseconds
from microturn.telemetry.spans import gen_ai_of

log = logging.getLogger(__name__)

# OpenTelemetry's own default.
_INTERVAL_MS = "60000"
_PAUSE_S = 0.1
# Of those that wait the last one is sent.
_MAX_WAITING = 8
_CUMULATIVE = 2
_UNITS = {"_seconds": "s", "_bytes": "By"}


class MetricExporter:
    """Sends metrics every minute, or every OTEL_METRIC_EXPORT_INTERVAL ms, but no more often than they are published.

    Args:
        collector: where to.
        metrics: of the engine; only what does not change is read of them.
        model: whose they are.

    Raises:
        InvalidArgument: the interval is no number.
    """

    def __init__(self, collector: Collector, metrics: Metrics, model: str) -> None:
        interval = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", _INTERVAL_MS)
        if not interval.isdecimal():
            raise InvalidArgument(f"OTEL_METRIC_EXPORT_INTERVAL is a number of milliseconds, not '{interval}'")
        self._interval_s = int(interval) / 1e3
        self._collector = collector
        self._families = list(metrics)
        self._gen_ai = gen_ai_of(model)
        self._latencies = (metrics.turn_seconds, metrics.first_token_seconds, metrics.output_token_seconds)
        names = ("request.duration", "time_to_first_token", "time_per_output_token")
        self._gen_ai_names = {
            family.name: f"gen_ai.server.{name}" for family, name in zip(self._latencies, names, strict=True)
        }
        self._exemplars: dict[str, dict[str, Any]] = {}
        self._begun = nanoseconds(time.time())
        self._next_s = time.monotonic()
        self._is_refused = False
        self._updates = BatchThread(
            "microturn-otlp-metrics",
            self._send_last,
            pause_s=_PAUSE_S,
            max_waiting=_MAX_WAITING,
            max_at_once=_MAX_WAITING,
        )

    def put(self, samples: Mapping[Sample, float], *, is_last: bool = False) -> None:
        """Queues an update without blocking, if it is time for one."""
        now_s = time.monotonic()
        if now_s >= self._next_s or is_last:
            self._next_s = now_s + self._interval_s
            self._updates.put(samples)

    def exemplify(self, turn: Turn, status: Status) -> None:
        """Notes a sampled turn, whose trace the next update names with the time that it took."""
        latencies = latencies_of(turn, status)
        if latencies is None:
            return
        _, trace_id, span_id, _ = turn.request.options["traceparent"].split("-")
        found = {"timeUnixNano": nanoseconds(time.time()), "traceId": trace_id, "spanId": span_id}
        for family, value in zip(self._latencies, latencies, strict=True):
            if value is not None:
                self._exemplars[family.name] = found | {"asDouble": value}

    def stop(self) -> None:
        """Sends what is queued, without retry; a collector that does not answer is not waited for."""
        self._updates.close(PATIENCE_S)

    def _send_last(self, updates: Sequence[Mapping[Sample, float]]) -> None:
        if self._is_refused:
            return
        to, metrics = self._collector, list(self._metrics_of(updates[-1]))
        message = {
            "resourceMetrics": [{"resource": to.resource, "scopeMetrics": [{"scope": to.scope, "metrics": metrics}]}]
        }
        trouble = to.send(message, self._updates.is_closing)
        if trouble is None:
            return
        # Numbers are totals, so the next update has what this one had.
        self._is_refused = has_no_place_for_it(trouble)
        log.warning("%s %s: %s", to.url, "takes no metrics" if self._is_refused else "did not take metrics", trouble)

    def _metrics_of(self, samples: Mapping[Sample, float]) -> Iterator[dict[str, Any]]:
        for family in self._families:
            exemplar = self._exemplars.pop(family.name, None)
            unit = next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "")
            data = self._data_of(family, samples, exemplar)
            name = family.name.removesuffix("_total")
            yield {"name": name, "description": family.meaning, "unit": unit, **data}
            if family.name in self._gen_ai_names:
                (point,) = data["histogram"]["dataPoints"]
                described = {**data["histogram"], "dataPoints": [point | {"attributes": attributes_of(self._gen_ai)}]}
                yield {"name": self._gen_ai_names[family.name], "unit": unit, "histogram": described}

    def _data_of(
        self, family: Family, samples: Mapping[Sample, float], exemplar: dict[str, Any] | None
    ) -> dict[str, Any]:
        kept = {"startTimeUnixNano": self._begun, "timeUnixNano": nanoseconds(time.time())}
        points = []
        for values in family.series:
            labels = tuple(zip(family.labels, values, strict=True))
            point: dict[str, Any] = {"attributes": attributes_of(dict(labels)), **kept}
            if isinstance(family, Histogram):
                up_to = [samples[f"{family.name}_bucket", (*labels, ("le", end))] for end in family.ends]
                point["count"] = str(int(up_to[-1]))
                point["sum"] = samples[f"{family.name}_sum", labels]
                point["explicitBounds"] = family.bounds
                point["bucketCounts"] = [str(int(upper - lower)) for lower, upper in pairwise((0, *up_to))]
                point["exemplars"] = [] if exemplar is None else [exemplar]
            else:
                point["asDouble"] = samples[family.name, labels]
            points.append(point)
        match family.kind:
            case "histogram":
                return {"histogram": {"aggregationTemporality": _CUMULATIVE, "dataPoints": points}}
            case "counter":
                return {"sum": {"aggregationTemporality": _CUMULATIVE, "isMonotonic": True, "dataPoints": points}}
        return {"gauge": {"dataPoints": points}}
