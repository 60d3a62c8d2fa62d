"""Times by their size, in buckets so narrow that a percentile is within half a percent of the exact one.

A histogram is bounded by the range of its values and not by their number, and several add up to one without loss: so
percentiles over all workers are as exact as those of one. Locust's own round to two digits.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Self

# Each bucket ends one percent above the one before it.
_GROWTH = 1.01
_LEAST_MS = 1e-3


class Histogram:
    """Milliseconds; anything below a microsecond counts as one.

    Attributes:
        num: values.
        total_ms: their sum.
        max_ms: the largest one, exactly.
    """

    def __init__(self) -> None:
        self.num = 0
        self.total_ms = 0.0
        self.max_ms = 0.0
        self._min_ms = math.inf
        self._buckets: Counter[int] = Counter()

    def add(self, ms: float) -> None:
        """Adds a value."""
        ms = max(ms, _LEAST_MS)
        self.num += 1
        self.total_ms += ms
        self.max_ms = max(self.max_ms, ms)
        self._min_ms = min(self._min_ms, ms)
        self._buckets[math.ceil(math.log(ms, _GROWTH))] += 1

    def merge(self, other: Histogram) -> None:
        """Adds all values of another one."""
        self.num += other.num
        self.total_ms += other.total_ms
        self.max_ms = max(self.max_ms, other.max_ms)
        self._min_ms = min(self._min_ms, other._min_ms)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float:
        """The mean, exactly; 0 without values."""
        return self.total_ms / self.num if self.num else 0.0

    def percentile(self, percent: float) -> float:
        """The smallest value that so many percent of all do not exceed, to half a percent; 0 without values."""
        return self.at_rank(math.ceil(self.num * percent / 100))

    def at_rank(self, rank: int) -> float:
        """The value before which so many less one come in their order, to half a percent; 0 without values."""
        remaining = min(max(1, rank), self.num)
        for bucket in sorted(self._buckets):
            remaining -= self._buckets[bucket]
            if remaining <= 0:
                return min(max(float(_GROWTH ** (bucket - 0.5)), self._min_ms), self.max_ms)
        return 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, for another process."""
        buckets = {str(bucket): num for bucket, num in self._buckets.items()}
        return {
            "num": self.num,
            "total_ms": self.total_ms,
            "max_ms": self.max_ms,
            "min_ms": self._min_ms,
            "by": buckets,
        }

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Self:
        """What `as_json` wrote."""
        histogram = cls()
        histogram.num, histogram.total_ms = written["num"], written["total_ms"]
        histogram.max_ms, histogram._min_ms = written["max_ms"], written["min_ms"]
        histogram._buckets = Counter({int(bucket): num for bucket, num in written["by"].items()})
        return histogram
