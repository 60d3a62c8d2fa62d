"""Publishes metrics to Triton in a separate thread: the changes since the last time, every few seconds.

An update is a message between two processes and takes 70 to 180 µs, during 25 to 40 µs of which this process's other
threads cannot run (measured, two cores). So the number of updates must not depend on the load. Triton's histograms need
an update per value; here a bucket is a counter under the name that Prometheus expects, `…_bucket`, and only differences
are sent: a few hundred updates each time, whatever the load.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from microturn.errors import Unavailable
from microturn.telemetry.families import Sample
from microturn.telemetry.metric_exporter import MetricExporter
from microturn.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

PERIOD_S = 5.0


class Publisher:
    """Publishes an engine's metrics until it is stopped or the engine has stopped.

    Args:
        metrics: of the engine; this thread reads them only after the engine has stopped.
        read: has the engine update the metrics, and returns their samples.
        family_type: `pb_utils.MetricFamily`.
        labels: of every metric.
        info: labels of `microturn_info`.
        exporter: takes them too; None if there is none.
    """

    def __init__(
        self,
        metrics: Metrics,
        read: Callable[[], Mapping[Sample, float]],
        family_type: Any,
        labels: Mapping[str, str],
        info: Mapping[str, str],
        exporter: MetricExporter | None = None,
    ) -> None:
        self._exporter = exporter
        self._metrics = metrics
        self._read = read
        self._published: dict[Sample, float] = {}
        # Triton drops a family that has no reference any more.
        self._families: dict[str, Any] = {}
        self._targets: dict[Sample, Any] = {}
        self._gauges: set[str] = set()
        for family in metrics:
            is_gauge = family.kind == "gauge"
            for name, own_labels in family.samples():
                if name not in self._families:
                    kind = family_type.GAUGE if is_gauge else family_type.COUNTER
                    self._families[name] = family_type(name=name, description=family.meaning, kind=kind)
                self._targets[name, own_labels] = self._families[name].Metric(labels={**labels, **dict(own_labels)})
                if is_gauge:
                    self._gauges.add(name)
        about = family_type(name="microturn_info", description="What is served.", kind=family_type.GAUGE)
        self._families["microturn_info"] = about
        self._about = about.Metric(labels={**labels, **info})
        self._about.set(1)
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="microturn-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publishes once more and ends the thread."""
        self._is_stopping.set()
        self._thread.join()

    def _run(self) -> None:
        is_last, pause_s = False, 0.0
        while not is_last:
            is_last, pause_s = self._is_stopping.wait(pause_s), PERIOD_S
            try:
                self._publish(self._read(), is_last=is_last)
            except Unavailable:
                self._publish(self._metrics.samples(), is_last=True)  # those of a stopped engine
                return
            except Exception:
                log.exception("metrics could not be published")

    def _publish(self, samples: Mapping[Sample, float], *, is_last: bool = False) -> None:
        if self._exporter is not None:
            self._exporter.put(samples, is_last=is_last)
        for sample, value in samples.items():
            change = value - self._published.get(sample, 0.0)
            if not change:
                continue
            target = self._targets[sample]
            if sample[0] in self._gauges:
                target.set(value)
            else:
                target.increment(change)
            self._published[sample] = value
