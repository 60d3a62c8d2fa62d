"""Metrics as Prometheus' text, for hosts that have no families of their own. A stand-in for `pb_utils.MetricFamily`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any


class Exposition:
    """All families of a process, as they stand. Callable in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, Family] = {}

    def family_type(self) -> Any:
        """A class whose families are here, to be used as `pb_utils.MetricFamily` is."""
        exposition = self

        class ExposedFamily(Family):
            def __init__(self, name: str, description: str, kind: str) -> None:
                super().__init__(name, description, kind)
                with exposition._lock:
                    exposition._families[name] = self

        return ExposedFamily

    def text(self) -> str:
        """In Prometheus' exposition format."""
        with self._lock:
            return "".join(family.text() for family in self._families.values())


class Family:
    """Samples of one name. A histogram is three of them, since buckets are counters here."""

    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name
        self._head = f"# HELP {name} {_escaped(description)}\n# TYPE {name} {kind}\n"
        self._samples: list[Sample] = []

    def Metric(self, labels: Mapping[str, str]) -> Sample:  # noqa: N802  # Triton's name
        """A new sample, of value 0."""
        sample = Sample(labels)
        self._samples.append(sample)
        return sample

    def text(self) -> str:
        """The family's lines."""
        lines = "".join(f"{self._name}{{{sample.labels}}} {sample.value!r}\n" for sample in list(self._samples))
        return self._head + lines


class Sample:
    """One value with its labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = ",".join(f'{name}="{_quoted(value)}"' for name, value in labels.items())
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = float(value)

    def increment(self, by: float) -> None:
        self.value += by


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")
