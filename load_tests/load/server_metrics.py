"""What the server says of itself on /metrics, and by how much that has changed. `docs/metrics.md` lists all of it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from urllib.request import urlopen

_LINE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LE = re.compile(r'\ble="([^"]+)"')

Samples = Mapping[str, float]


def scrape(url: str) -> dict[str, float]:
    """The server's own metrics by name and labels, as they are written; Triton's are left out.

    Raises:
        OSError: when nobody answers.
    """
    with urlopen(url, timeout=5) as answer:
        return parse(answer.read().decode())


def parse(text: str) -> dict[str, float]:
    """The same from Prometheus' text format."""
    lines = (_LINE.fullmatch(line) for line in text.splitlines() if line.startswith("microturn_"))
    return {line.string[: line.start("value") - 1]: float(line["value"]) for line in lines if line is not None}


def counts_between(before: Samples, after: Samples) -> dict[str, float]:
    """By how much each counter has grown, and what sessions and pages there are at the end; where it is not 0."""
    counts = {key: value - before.get(key, 0.0) for key, value in after.items() if "_total" in key}
    gauges = {key: value for key, value in after.items() if key.startswith(("microturn_sessions{", "microturn_pages{"))}
    return {key: value for key, value in {**counts, **gauges}.items() if value}


class Buckets:
    """A histogram of the server over some time.

    Attributes:
        num: values.

    Args:
        before: samples at its beginning.
        after: at its end.
        name: of the histogram; series that differ in other labels are added up.
    """

    def __init__(self, before: Samples, after: Samples, name: str) -> None:
        up_to: defaultdict[float, float] = defaultdict(float)
        for key, value in after.items():
            if key.startswith(f"{name}_bucket{{") and (bound := _LE.search(key)) is not None:
                up_to[float(bound[1])] += value - before.get(key, 0.0)
        self._up_to = sorted(up_to.items())
        self.num = round(self._up_to[-1][1]) if self._up_to else 0

    def percentile(self, percent: float) -> float:
        """In the unit of the metric, interpolated within a bucket as Prometheus does; 0 without values."""
        wanted = self.num * percent / 100
        lower, below = 0.0, 0.0
        for bound, up_to in self._up_to:
            if up_to >= wanted and up_to > below:
                return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (up_to - below)
            lower, below = bound, up_to
        return 0.0
