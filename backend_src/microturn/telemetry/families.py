"""Metric families and their values: plain numbers in this process, changed by one thread.

A family has a series for each combination of label values, all created at the start: a rate over a counter that appears
with its first event would miss that event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, product

# The values of a family's labels, in the order of its labels.
LabelValues = tuple[str, ...]

# A sample's name and labels, as in Prometheus.
Sample = tuple[str, tuple[tuple[str, str], ...]]


class Family:
    """Base of counters, gauges and histograms.

    Args:
        name: the Prometheus name.
        meaning: one line of help.
        labels: the values of each label.
    """

    kind: str

    def __init__(self, name: str, meaning: str, **labels: Sequence[str]) -> None:
        self.name = name
        self.meaning = meaning
        self.labels: Mapping[str, Sequence[str]] = labels
        self.series: list[LabelValues] = list(product(*labels.values()))

    def samples(self) -> dict[Sample, float]:
        """All samples of the family."""
        raise NotImplementedError

    def _named(self, values: LabelValues) -> tuple[tuple[str, str], ...]:
        return tuple(zip(self.labels, values, strict=True))


class Gauge(Family):
    """Numbers that go up and down."""

    kind = "gauge"

    def __init__(self, name: str, meaning: str, **labels: Sequence[str]) -> None:
        super().__init__(name, meaning, **labels)
        self.values = dict.fromkeys(self.series, 0.0)

    def set(self, value: float, *values: str) -> None:
        """Sets the value of the series with these label values."""
        assert values in self.values, f"{self.name} has no {values}"
        self.values[values] = value

    def total(self) -> float:
        """Sum over all series."""
        return sum(self.values.values())

    def samples(self) -> dict[Sample, float]:
        return {(self.name, self._named(values)): number for values, number in self.values.items()}


class Counter(Gauge):
    """Numbers that only increase."""

    kind = "counter"

    def add(self, *values: str, by: float = 1) -> None:
        """Adds one event, or `by` events."""
        self.values[values] += by


class _Tally:
    """One series of a histogram.

    Attributes:
        counts: values in each bucket, and above the last bound.
        total: the sum of all values.
    """

    def __init__(self, num_bounds: int) -> None:
        self.counts = [0] * (num_bounds + 1)
        self.total = 0.0


class Histogram(Family):
    """A histogram of values.

    Args:
        bounds: upper bounds of the buckets, ascending.

    Attributes:
        ends: of the buckets, as Prometheus' label `le` has them.
    """

    kind = "histogram"

    def __init__(self, name: str, meaning: str, bounds: Sequence[float], **labels: Sequence[str]) -> None:
        super().__init__(name, meaning, **labels)
        self.bounds = list(bounds)
        self._tallies = {values: _Tally(len(self.bounds)) for values in self.series}
        self.ends = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]

    def observe(self, value: float, *values: str) -> None:
        """Adds a value."""
        tally = self._tallies[values]
        tally.counts[bisect_left(self.bounds, value)] += 1
        tally.total += value

    def count(self, *values: str) -> int:
        """Number of values."""
        return sum(self._tallies[values].counts)

    def samples(self) -> dict[Sample, float]:
        """Cumulative counts (`_bucket`), the total count (`_count`) and the sum (`_sum`)."""
        found: dict[Sample, float] = {}
        for values, tally in self._tallies.items():
            labels = self._named(values)
            up_to = list(accumulate(tally.counts))
            for end, number in zip(self.ends, up_to, strict=True):
                found[f"{self.name}_bucket", (*labels, ("le", end))] = number
            found[f"{self.name}_sum", labels] = tally.total
            found[f"{self.name}_count", labels] = up_to[-1]
        return found
