"""What the gateway counts, as `/metrics` says it in Prometheus' text format. docs/metrics.md has the table.

Plain numbers of one event loop: a replica has its own, and Prometheus adds them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bounds of the time to the first text in seconds, finer where a person begins to wait.
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)

REALTIME = "/v1/realtime"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
_EXACT = (REALTIME, "/v1/realtime/client_secrets", CHAT, RESPONSES, "/v1/models", "/health", "/metrics")
_WITH_NAME = {"/v1/responses/": "/v1/responses/{id}", "/v1/models/": "/v1/models/{id}"}
ENDPOINTS = (*_EXACT, *_WITH_NAME.values(), "page", "other")


def endpoint_of(path: str) -> str:
    """The endpoint that a path belongs to, one of `ENDPOINTS`, however paths are made up."""
    if path in _EXACT:
        return path
    for beginning, endpoint in _WITH_NAME.items():
        if path.startswith(beginning):
            return endpoint
    return "other" if path.startswith("/v1") else "page"


class Counter:
    """Events, by the values of labels; a series is there from its first event on.

    Args:
        name: the Prometheus name.
        meaning: one line of help.
        labels: their names.
    """

    kind = "counter"

    def __init__(self, name: str, meaning: str, *labels: str) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = labels
        self._values: dict[tuple[str, ...], int] = {}

    def add(self, *values: str) -> None:
        """One event more."""
        self._values[values] = self._values.get(values, 0) + 1

    def samples(self) -> Iterator[str]:
        """Its lines."""
        for values, number in self._values.items():
            yield _sample(self.name, dict(zip(self.labels, values, strict=True)), number)


class Gauge:
    """A number as it is when it is asked for, by the values of one label or without any."""

    kind = "gauge"

    def __init__(self, name: str, meaning: str, label: str | None, ask: Callable[[], dict[str, int]]) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = () if label is None else (label,)
        self._ask = ask

    def samples(self) -> Iterator[str]:
        """Its lines."""
        for value, number in self._ask().items():
            yield _sample(self.name, dict.fromkeys(self.labels, value), number)


class Histogram:
    """Times, by the value of one label; its series are there from the start."""

    kind = "histogram"

    def __init__(self, name: str, meaning: str, label: str, *values: str) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = (label,)
        self._counts = {value: [0] * (len(SECONDS) + 1) for value in values}
        self._sums = dict.fromkeys(values, 0.0)

    def observe(self, value: str, took_s: float) -> None:
        """One more time."""
        self._counts[value][bisect_left(SECONDS, took_s)] += 1
        self._sums[value] += took_s

    def samples(self) -> Iterator[str]:
        """Its lines."""
        (label,) = self.labels
        for value, counts in self._counts.items():
            for bound, number in zip((*SECONDS, "+Inf"), accumulate(counts), strict=True):
                yield _sample(f"{self.name}_bucket", {label: value, "le": str(bound)}, number)
            yield _sample(f"{self.name}_sum", {label: value}, self._sums[value])
            yield _sample(f"{self.name}_count", {label: value}, sum(counts))


class Metrics:
    """All of them.

    Args:
        sessions: how many there are now, by kind.
        max_sessions: how many there may be, of each kind.
    """

    def __init__(self, sessions: Callable[[], dict[str, int]], max_sessions: int) -> None:
        self.requests = Counter(
            "microturn_gateway_requests_total",
            "Requests that were answered, by their HTTP status; 101 is a WebSocket, 499 a client that left before.",
            *("endpoint", "status"),
        )
        self.refusals = Counter(
            "microturn_gateway_refusals_total", "Requests and events that were refused.", "endpoint", "code"
        )
        self.first_text = Histogram(
            "microturn_gateway_first_text_seconds",
            "From a request for an answer that streams to its first text.",
            "endpoint",
            *(REALTIME, CHAT, RESPONSES),
        )
        self.families = (
            self.requests,
            self.refusals,
            self.first_text,
            Gauge("microturn_gateway_sessions", "Sessions that are open on the server.", "kind", sessions),
            Gauge(
                "microturn_gateway_sessions_limit",
                "Sessions of each kind that there may be.",
                None,
                lambda: {"": max_sessions},
            ),
        )

    def text(self) -> str:
        """What a scrape gets."""
        lines = []
        for family in self.families:
            lines += [f"# HELP {family.name} {family.meaning}", f"# TYPE {family.name} {family.kind}"]
            lines += family.samples()
        return "\n".join(lines) + "\n"


def _sample(name: str, labels: dict[str, str], number: float) -> str:
    """One line; no value of ours has a character that would need an escape."""
    written = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{written}}} {number}" if written else f"{name} {number}"
