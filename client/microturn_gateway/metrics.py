"""What the gateway counts, for Prometheus. docs/metrics.md has the table.

A gateway has a registry of its own, for one event loop: each replica counts for itself, and Prometheus adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

# Bounds of the time to the first text in seconds, finer where a person begins to wait.
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)

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


class Metrics:
    """All of them.

    Attributes:
        registry: has them all, for a scrape.
        requests: that were answered, by endpoint and status.
        refusals: requests and events that were refused, by endpoint and code.
        first_text: seconds from a request to the first text of its stream, by endpoint.

    Args:
        num_sessions: how many there are now, by kind.
        max_sessions: how many there may be, of each kind.
    """

    def __init__(self, num_sessions: Mapping[str, Callable[[], int]], max_sessions: int) -> None:
        disable_created_metrics()  # a series beside each counter's, which says when the counter began
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "microturn_gateway_requests_total",
            "Requests that were answered, by their HTTP status; 101 is a WebSocket, 499 a client that left before.",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.refusals = Counter(
            "microturn_gateway_refusals_total",
            "Requests and events that were refused.",
            ("endpoint", "code"),
            registry=self.registry,
        )
        self.first_text = Histogram(
            "microturn_gateway_first_text_seconds",
            "From a request for an answer that streams to its first text.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        for endpoint in (REALTIME, CHAT, RESPONSES):
            self.first_text.labels(endpoint)  # is there from the start, with zeros
        sessions = Gauge(
            "microturn_gateway_sessions", "Sessions that are open on the server.", ("kind",), registry=self.registry
        )
        for kind, num in num_sessions.items():
            sessions.labels(kind).set_function(num)
        limit = Gauge(
            "microturn_gateway_sessions_limit", "Sessions of each kind that there may be.", registry=self.registry
        )
        limit.set(max_sessions)
