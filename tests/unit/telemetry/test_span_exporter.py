"""Tests of spans and their export, against a collector that decodes what comes."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest

from microturn.errors import ContextFull, InvalidArgument
from microturn.sessions.turn import Turn
from microturn.telemetry import otlp, span_exporter
from microturn.telemetry.otlp import find_collector
from microturn.telemetry.span_exporter import SpanExporter
from microturn.telemetry.spans import AnsweredTurn, is_sampled, spans_of
from support.collector import Collector, running_collector
from support.fake_runner import FakeDriver

TRACE_ID, PARENT_ID = "ab" * 16, "cd" * 8


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(span_exporter, "_PAUSE_S", 0.01)
    monkeypatch.setattr(otlp, "_RETRY_PAUSES_S", (0.01, 0.01))
    with running_collector() as collector:
        yield collector


def answered(*, flags: str = "01", **options: Any) -> AnsweredTurn:
    """A turn that took 60 ms until its first token, 30 more until its end, and 5 to be sent."""
    driver = FakeDriver()
    answer, turn = driver.post(
        7, [5, 6], start=True, max_tokens=2, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-{flags}", **options
    )
    driver.clock.now_s += 0.06
    driver.engine.step()
    driver.clock.now_s += 0.03
    driver.run()
    return AnsweredTurn(turn, answer.status, driver.clock(), driver.clock() + 0.005)


def exporter_to(endpoint: str, service: Mapping[str, str] | None = None) -> SpanExporter:
    found = find_collector("traces", endpoint, service or {})
    assert found is not None
    return SpanExporter(found, "tiny")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class SpeaksHttp2(socketserver.BaseRequestHandler):
    """Answers whatever comes with an empty SETTINGS frame."""

    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.request.sendall(b"\0\0\0\4\0\0\0\0\0")


def times_ms(span: dict[str, Any], since: AnsweredTurn) -> tuple[float, float]:
    arrived_ns = since.turn.request.arrived_s * 1e9
    begun, ended = (int(span[f"{which}TimeUnixNano"]) - arrived_ns for which in ("start", "end"))
    return begun / 1e6, ended / 1e6


def test_the_parts_of_a_turn_follow_each_other() -> None:
    turn = answered()
    whole, *parts = spans_of(turn, unix_offset_s=0.0, model="tiny")
    assert (whole["name"], whole["traceId"], whole["parentSpanId"]) == ("turn", TRACE_ID, PARENT_ID)
    assert times_ms(whole, turn) == pytest.approx((0, 95), abs=0.01)
    assert [part["name"] for part in parts] == ["queue", "decode", "send"]
    assert {part["parentSpanId"] for part in parts} == {whole["spanId"]}
    times = [times_ms(part, turn) for part in parts]
    assert times == [pytest.approx(expected, abs=0.01) for expected in ((0, 60), (60, 90), (90, 95))]
    assert all(one[1] == next_one[0] for one, next_one in pairwise(times))
    assert len({span["spanId"] for span in (whole, *parts)}) == 4


def test_a_refused_turn_is_a_span_with_its_error() -> None:
    turn = answered().turn
    error = ContextFull("too much")
    whole, send = spans_of(AnsweredTurn(Turn(turn.request), error, 1001.0, 1001.5), unix_offset_s=0.0, model="tiny")
    assert whole["status"] == {"code": 2, "message": "CONTEXT_FULL: too much"}
    assert send["name"] == "send"


@pytest.mark.parametrize(("flags", "expected"), [("01", True), ("00", False), ("03", True), ("02", False)])
def test_the_client_says_whether_its_trace_is_sampled(flags: str, expected: bool) -> None:
    assert is_sampled(answered(flags=flags).turn) is expected


def test_a_turn_without_a_trace_is_not_sampled() -> None:
    driver = FakeDriver()
    _, turn = driver.post(7, [5], start=True)
    assert not is_sampled(turn)


def test_spans_arrive(collector: Collector) -> None:
    exporter = exporter_to(collector.endpoint, {"microturn.model_name": "tiny"})
    turn = answered(temperature=0.5, seed=7)
    exporter.put(turn)
    exporter.put(turn)
    spans = collector.wait_for(8)
    exporter.stop()
    whole = spans[0]
    assert whole.attributes == {
        "microturn.session": "7",
        "microturn.turn": 0,
        "microturn.finish_reason": "length",
        "microturn.input_tokens": 2,
        "microturn.output_tokens": 2,
        "microturn.computed_tokens": 3,
        "microturn.cached_tokens": 0,
        # OpenTelemetry's own names, for tools that know them.
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "microturn",
        "gen_ai.request.model": "tiny",
        "gen_ai.conversation.id": "7",
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
    }
    assert whole.resource["service.name"] == "microturn"
    assert whole.resource["microturn.model_name"] == "tiny"
    assert exporter.num_dropped == 0


def test_what_waits_is_sent_at_the_end(collector: Collector) -> None:
    exporter = exporter_to(collector.endpoint)
    exporter.put(answered())
    exporter.stop()
    assert len(collector.spans) == 4


def test_a_collector_that_is_away_for_a_moment_loses_nothing(collector: Collector) -> None:
    collector.answers = [503, 429]
    exporter = exporter_to(collector.endpoint)
    exporter.put(answered())
    assert len(collector.wait_for(4)) == 4
    exporter.stop()
    assert (collector.num_requests, exporter.num_dropped) == (3, 0)


@pytest.mark.parametrize(("answers", "num_requests"), [([400], 1), ([503, 503, 503], 3)])
def test_what_is_lost_is_counted(
    collector: Collector, caplog: pytest.LogCaptureFixture, answers: list[int], num_requests: int
) -> None:
    collector.answers = answers
    exporter = exporter_to(collector.endpoint)
    exporter.put(answered())
    wait_until(lambda: exporter.num_dropped == 1)
    exporter.put(answered())
    collector.wait_for(4)
    exporter.stop()
    assert collector.num_requests == num_requests + 1
    assert "spans of" in caplog.text


def test_what_answers_need_not_speak_http(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The gRPC port of a collector answers in HTTP/2: the thread ended there, and counted nothing of what it lost."""
    monkeypatch.setattr(span_exporter, "_PAUSE_S", 0.01)
    monkeypatch.setattr(otlp, "_RETRY_PAUSES_S", (0.01, 0.01))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SpeaksHttp2) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        exporter = exporter_to(f"http://127.0.0.1:{server.server_address[1]}")
        exporter.put(answered())
        wait_until(lambda: exporter.num_dropped == 1)
        exporter.put(answered())
        exporter.stop()
        server.shutdown()
    assert exporter.num_dropped == 2
    assert "spans of 1 turns are lost" in caplog.text


def test_nobody_waits_for_a_collector_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_exporter, "_MAX_WAITING", 3)
    monkeypatch.setattr(span_exporter, "_PAUSE_S", 3600.0)
    exporter = exporter_to("http://127.0.0.1:9")
    turn = answered()
    for _ in range(10):
        exporter.put(turn)
    assert exporter.num_dropped == 7
    exporter.stop()
    assert exporter.num_dropped == 10


def test_a_stop_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited ten seconds for each batch, and the last metrics, which are sent after the spans, never came."""
    monkeypatch.setattr(span_exporter, "PATIENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        exporter = exporter_to(f"http://127.0.0.1:{hanging.getsockname()[1]}")
        exporter.put(answered())
        began_s = time.monotonic()
        exporter.stop()
        assert time.monotonic() - began_s < 5


def test_opentelemetrys_own_variables_are_read(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{collector.endpoint}/")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Basic%20abc,x-team=voice")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "talks")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    exporter = exporter_to("")
    exporter.put(answered())
    (span, *_) = collector.wait_for(4)
    exporter.stop()
    assert (span.resource["service.name"], span.resource["deployment.environment"]) == ("talks", "test")
    assert collector.headers["authorization"] == "Basic abc"
    assert collector.headers["x-team"] == "voice"


@pytest.mark.parametrize("signal", ["traces", "metrics"])
def test_telemetry_goes_nowhere_unless_somebody_says_where(signal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert find_collector(signal, "", {}) is None
    with pytest.raises(InvalidArgument, match=f"{signal} go to an address"):
        find_collector(signal, "localhost:4318", {})
    found = find_collector(signal, "http://here:4318/", {})
    assert found is not None
    assert found.url == f"http://here:4318/v1/{signal}"
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "http://there/all")
    found = find_collector(signal, "", {})
    assert found is not None
    assert found.url == "http://there/all"
    monkeypatch.setenv(f"OTEL_{signal.upper()}_EXPORTER", "none")
    assert find_collector(signal, "http://here:4318/", {}) is None
