"""The dashboard's expressions and the rules, on a real Prometheus that scraped a real run."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn_client import Client
from support.edge import DEPLOY
from support.gateway import running_gateway
from support.prometheus import Prometheus
from support.served import Served, Start

DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "microturn.json").read_text())
VARIABLES = {"$__rate_interval": "1m", "$job": "microturn", "$model": ".*", "$instance": ".*"}
NUM_OPEN = 3
NUM_TURNS = 5


def _panels() -> Iterator[Any]:
    for panel in DASHBOARD["panels"]:
        for number, target in enumerate(panel.get("targets", [])):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield pytest.param(expression, id=f"{panel['title']}-{number}")


@pytest.fixture(scope="module")
def served(start_tiny: Start) -> Served:
    served = start_tiny("--health-timeout-s=60")
    served.wait_until_ready(60)
    return served


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, served: Served) -> Iterator[Prometheus]:
    """After a run: three sessions that took five turns each and stay, and one that ended with an error."""
    scraped = Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{served.metrics_port}")
    with closing(scraped), Client(served.address, timeout_s=60) as client:
        scraped.wait_for("microturn_heartbeat_timestamp_seconds")  # what is there before can grow
        sessions = [client.session(idle_timeout_s=600) for _ in range(NUM_OPEN)]
        for _ in range(NUM_TURNS):
            for session in sessions:
                session.turn(" so it goes", max_tokens=4, ignore_eos=True, deadline_ms=30_000).wait()
        with client.session(max_context=20) as refused, pytest.raises(Exception, match="max_context"):
            refused.turn("Hello", max_tokens=50).wait()
        num_turns = NUM_OPEN * NUM_TURNS
        scraped.wait_for(f'sum(microturn_turns_total{{finish_reason="length"}}) == {num_turns}')
        scraped.wait_for(f"sum(microturn_sessions) == {NUM_OPEN}")
        yield scraped


@pytest.mark.parametrize("expression", list(_panels()))
def test_every_panel_shows_something(prometheus: Prometheus, expression: str) -> None:
    assert "$" not in expression
    prometheus.wait_for(expression, timeout_s=30)


@pytest.mark.parametrize(
    "expected",
    [
        f"sum(microturn_sessions) == {NUM_OPEN}",
        f"instance:microturn_sessions:ratio == {NUM_OPEN} / 256",
        "microturn:deadlines_met:ratio_rate5m == 1",
        'sum(microturn_turn_errors_total{code="CONTEXT_FULL"}) == 1',
        "microturn:turn_errors:ratio_rate5m > 0 < 0.5",
        "microturn:turn_seconds:p50_rate5m > 0 < 30",
        # Empty turns (keep-alives, and an END alone) are not measured.
        f"sum(microturn_turn_seconds_count) == {NUM_OPEN * NUM_TURNS}",
    ],
)
def test_what_the_panels_show_is_what_happened(prometheus: Prometheus, expected: str) -> None:
    """A rule is evaluated when its time comes; before, its ratio is not a number, and so no comparison's."""
    prometheus.wait_for(expected, timeout_s=30)


def test_every_rule_is_evaluated_and_nothing_fires(prometheus: Prometheus) -> None:
    rules = prometheus.rules()
    written = [
        rule.get("record") or rule["alert"]
        for name in ("recording-rules.yml", "alert-rules.yml")
        for group in yaml.safe_load((DEPLOY / "prometheus" / name).read_text())["groups"]
        for rule in group["rules"]
    ]
    assert sorted(rule["name"] for rule in rules) == sorted(written)
    assert {rule["health"] for rule in rules} == {"ok"}
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_a_gateway_is_scraped_by_the_token_of_its_metrics(tmp_path: Path) -> None:
    file = tmp_path / "metrics-token"
    file.write_text("of sixteen characters and more")
    with (
        running_gateway("localhost:1", token="a-token-of-its-clients", metrics_token=file.read_text()) as address,
        closing(Prometheus(tmp_path, address, "gateway", file)) as scraped,
    ):
        scraped.wait_for('microturn_gateway_sessions_limit{job="gateway"} == 64')
        scraped.wait_for('microturn_gateway_requests_total{endpoint="/metrics", status="200"} > 0')
        assert scraped.query('{__name__=~"microturn_gateway_.*_created"}') == []


def test_dashboard_and_rules_use_metrics_that_are_documented() -> None:
    page = (DEPLOY.parent / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(microturn_(?!gateway_)\w+)`", page, re.MULTILINE))
    assert len(documented) > 30
    texts = [(DEPLOY / "prometheus" / name).read_text() for name in ("recording-rules.yml", "alert-rules.yml")]
    texts.append(json.dumps(DASHBOARD))
    used = {name for text in texts for name in re.findall(r"(?<![\w:])microturn_\w+", text)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= documented
    shown = set(re.findall(r"(?<![\w:])microturn_\w+", texts[-1]))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == documented


def test_a_dead_model_process_is_seen_though_triton_stays_green(served: Served, prometheus: Prometheus) -> None:
    """The last of this file: it kills what the others look at. The supervisor is held, or it would mend it."""
    rules = {rule["name"]: rule for rule in prometheus.rules()}
    down = rules["MicroturnModelDown"]["query"].replace("[30s]", "[5s]")
    prometheus.wait_for(f"absent({down})")
    served.process.send_signal(signal.SIGSTOP)
    served.model_process().kill()
    prometheus.wait_for(down)
    triton = service_pb2_grpc.GRPCInferenceServiceStub(served.channel)
    assert triton.ServerReady(service_pb2.ServerReadyRequest(), timeout=10).ready
    assert prometheus.value('up{job="microturn"}') == 1
    served.process.send_signal(signal.SIGCONT)
