"""A small OpenTelemetry collector: takes spans and metrics as OTLP over HTTP in JSON, as a real one's receiver does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Span:
    """A span that came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    status: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """What has come so far.

    Attributes:
        endpoint: where exporters find it.
        metrics: as they came last, by name.
        exemplars: trace and metric of all that have ever come; each comes once.
        headers: of the last request, by their names in small letters.
        answers: what the next requests are answered with; 200 when there are no more.
    """

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    exemplars: set[tuple[str, str]] = field(default_factory=set)
    headers: dict[str, str] = field(default_factory=dict)
    answers: list[int] = field(default_factory=list)
    num_requests: int = 0

    def wait_for(self, num_spans: int, timeout_s: float = 60.0) -> list[Span]:
        deadline_s = time.monotonic() + timeout_s
        while len(self.spans) < num_spans:
            assert time.monotonic() < deadline_s, f"{len(self.spans)} spans came, not {num_spans}"
            time.sleep(0.02)
        return list(self.spans)

    def wait_for_metrics(self, condition: Callable[[dict[str, dict[str, Any]]], bool], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not (self.metrics and condition(self.metrics)):
            assert time.monotonic() < deadline_s, sorted(self.metrics)
            time.sleep(0.02)

    def take_metrics(self, body: bytes) -> None:
        for of_resource in json.loads(body)["resourceMetrics"]:
            for scope in of_resource["scopeMetrics"]:
                assert scope["scope"]["name"] == "microturn"
                self.exemplars |= {
                    (exemplar["traceId"], metric["name"])
                    for metric in scope["metrics"]
                    for point in metric.get("histogram", {}).get("dataPoints", [])
                    for exemplar in point["exemplars"]
                }
                self.metrics = {metric["name"]: metric for metric in scope["metrics"]}

    def take(self, body: bytes) -> None:
        for of_resource in json.loads(body)["resourceSpans"]:
            resource = _values(of_resource["resource"]["attributes"])
            for scope in of_resource["scopeSpans"]:
                assert scope["scope"]["name"] == "microturn"
                self.spans += [_span(span, resource) for span in scope["spans"]]


def _span(span: dict[str, Any], resource: dict[str, Any]) -> Span:
    assert len(bytes.fromhex(span["traceId"])) == 16
    assert len(bytes.fromhex(span["spanId"])) == len(bytes.fromhex(span["parentSpanId"])) == 8
    return Span(
        name=span["name"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span["parentSpanId"],
        kind=span["kind"],
        begun_ns=int(span["startTimeUnixNano"]),
        ended_ns=int(span["endTimeUnixNano"]),
        attributes=_values(span.get("attributes", [])),
        status=span.get("status", {}),
        resource=resource,
    )


def _values(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {attribute["key"]: _value(attribute["value"]) for attribute in attributes}


def _value(value: dict[str, Any]) -> Any:
    ((kind, said),) = value.items()
    if kind == "arrayValue":
        return [_value(part) for part in said["values"]]
    return {"stringValue": str, "intValue": int, "doubleValue": float}[kind](said)


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port of loopback."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.headers = {name.lower(): value for name, value in self.headers.items()}
            collector.num_requests += 1
            code = collector.answers.pop(0) if collector.answers else 200
            if code == 200:
                assert self.headers["Content-Type"] == "application/json"
                {"/v1/traces": collector.take, "/v1/metrics": collector.take_metrics}[self.path](body)
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
