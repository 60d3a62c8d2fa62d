"""What the gateway counts of itself, over HTTP and WebSockets before a fake server, and the table of it in the docs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.routing import Route
from starlette.testclient import TestClient
from websockets.exceptions import InvalidStatus

from microturn_client.testing import FakeServer
from microturn_gateway import app
from microturn_gateway.measured import Measured
from microturn_gateway.metrics import ENDPOINTS, Metrics, endpoint_of
from microturn_gateway.settings import GatewaySettings
from support.gateway import running_gateway
from support.realtime_socket import connected, received
from support.scrape import Page

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
TOKEN = "a-token-of-some-length"
SCRAPER = "prometheus-has-this-one"
CHAT = "/v1/chat/completions"
PLAIN = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}

Opened = Callable[..., TestClient]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens a gateway of these settings."""
    server = FakeServer()
    monkeypatch.setattr(app, "AsyncClient", lambda _address: server.async_client())
    with ExitStack() as running:

        def open_it(**settings: Any) -> TestClient:
            gateway = app.build_app(GatewaySettings(**settings))
            client = TestClient(gateway, base_url="http://localhost:8080", raise_server_exceptions=False)
            return running.enter_context(client)

        yield open_it


def scraped(gateway: TestClient) -> Page:
    response = gateway.get("/metrics")
    assert response.headers["content-type"] == CONTENT_TYPE_LATEST
    return Page(response.text)


def test_requests_are_counted_by_endpoint_and_status(opened: Opened) -> None:
    gateway = opened()
    for _ in range(2):
        assert gateway.post(CHAT, json=PLAIN).status_code == 200
    assert gateway.post(CHAT, json={}).status_code == 400
    assert gateway.get("/v1/responses/resp_of_somebody").status_code == 404
    assert gateway.get("/v1/embeddings").status_code == 404
    assert gateway.get("/health").status_code == 200
    page = scraped(gateway)
    counted = {
        (labels["endpoint"], labels["status"]): page.sum("microturn_gateway_requests_total", **labels)
        for labels in page.labels("microturn_gateway_requests_total")
    }
    assert counted == {
        (CHAT, "200"): 2,
        (CHAT, "400"): 1,
        ("/v1/responses/{id}", "404"): 1,
        ("other", "404"): 1,
        ("/health", "200"): 1,
    }
    refused = {(labels["endpoint"], labels["code"]) for labels in page.labels("microturn_gateway_refusals_total")}
    assert refused == {
        (CHAT, "missing_parameter"),
        ("/v1/responses/{id}", "response_not_found"),
        ("other", "unknown_url"),
    }


@pytest.mark.parametrize(("endpoint", "asked"), [(CHAT, PLAIN), ("/v1/responses", {"input": "Hello"})])
def test_the_time_to_the_first_text_of_answers_that_stream(opened: Opened, endpoint: str, asked: Any) -> None:
    gateway = opened()
    assert gateway.post(endpoint, json=asked).status_code == 200
    assert scraped(gateway).sum("microturn_gateway_first_text_seconds_count", endpoint=endpoint) == 0
    assert gateway.post(endpoint, json={**asked, "stream": True}).status_code == 200
    page = scraped(gateway)
    assert page.sum("microturn_gateway_first_text_seconds_count", endpoint=endpoint) == 1
    assert page.sum("microturn_gateway_first_text_seconds_bucket", endpoint=endpoint, le="+Inf") == 1
    assert page.sum("microturn_gateway_first_text_seconds_sum", endpoint=endpoint) > 0
    assert page.sum("microturn_gateway_first_text_seconds_count") == 1


async def test_a_realtime_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "AsyncClient", lambda _address: FakeServer().async_client())
    with running_gateway("localhost:8001", max_sessions=1) as address:
        async with httpx2.AsyncClient(base_url=f"http://{address}") as http:
            async with connected(address) as socket:
                with pytest.raises(InvalidStatus):
                    async with connected(address):
                        pass
                assert Page((await http.get("/metrics")).text).sum("microturn_gateway_sessions", kind="socket") == 1
                await socket.send(json.dumps({"type": "nothing.of.ours"}))
                await socket.send(json.dumps({"type": "input_text_buffer.append", "text": "Hello"}))
                await socket.send(json.dumps({"type": "response.create", "response": {"max_output_tokens": 4}}))
                while (await received(socket))["type"] != "response.done":
                    pass
            async with asyncio.timeout(60):
                while (page := Page((await http.get("/metrics")).text)).sum("microturn_gateway_sessions") > 0:
                    await asyncio.sleep(0.01)
    assert page.sum("microturn_gateway_sessions_limit") == 1
    for status in ("101", "429"):
        assert page.sum("microturn_gateway_requests_total", endpoint="/v1/realtime", status=status) == 1
    for code in ("too_many_sessions", "unknown_event"):
        assert page.sum("microturn_gateway_refusals_total", endpoint="/v1/realtime", code=code) == 1
    assert page.sum("microturn_gateway_first_text_seconds_count", endpoint="/v1/realtime") == 1


def test_sessions_that_are_kept(opened: Opened) -> None:
    gateway = opened()
    for text in ("Hello", "Good morning"):
        assert gateway.post(CHAT, json={**PLAIN, "messages": [{"role": "user", "content": text}]}).status_code == 200
    assert scraped(gateway).sum("microturn_gateway_sessions", kind="kept") == 2


@pytest.mark.parametrize(
    ("said", "status"), [(None, 401), ("Bearer wrong", 401), (f"Bearer {TOKEN}", 200), (f"Bearer {SCRAPER}", 200)]
)
def test_who_may_scrape(opened: Opened, said: str | None, status: int) -> None:
    gateway = opened(token=TOKEN, metrics_token=SCRAPER, host="0.0.0.0")
    headers = {"host": "gateway.example", **({} if said is None else {"authorization": said})}
    assert gateway.get("/metrics", headers=headers).status_code == status
    expected = 200 if said == f"Bearer {TOKEN}" else 401
    assert gateway.get("/v1/models", headers=headers).status_code == expected


def test_without_a_token_loopback_names_only(opened: Opened) -> None:
    gateway = opened()
    assert gateway.get("/metrics").status_code == 200
    assert gateway.get("/metrics", headers={"host": "gateway.example"}).status_code == 403


@pytest.mark.parametrize(
    "path", ["/v1/models/a\nb", "/v1/responses/x", '/v1/"}', "/", "/page.js", "/v1", "/v1/realtime/"]
)
def test_paths_that_are_made_up_make_no_series(path: str) -> None:
    assert endpoint_of(path) in ENDPOINTS


def test_every_route_is_an_endpoint_of_its_own() -> None:
    api, *others = app.build_app(GatewaySettings()).routes
    routes = [("/v1", route) for route in api.routes] + [("", route) for route in others]
    endpoints = {endpoint_of(prefix + route.path) for prefix, route in routes if isinstance(route, Route)}
    assert endpoints | {"/v1/realtime", "page", "other"} == set(ENDPOINTS)


async def test_a_fault_is_no_client_that_left() -> None:
    async def failing(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ZeroDivisionError

    metrics = Metrics({}, 1)
    with pytest.raises(ZeroDivisionError):
        await Measured(failing, metrics)({"type": "websocket", "path": "/v1/realtime"}, None, None)
    page = Page(generate_latest(metrics.registry).decode())
    assert page.labels("microturn_gateway_requests_total") == [{"endpoint": "/v1/realtime", "status": "500"}]


def test_the_table_and_the_code_are_the_same() -> None:
    rows = re.findall(r"^\| `(microturn_gateway_\w+)` \| (\w+) \|[^|]*\|([^|]*)\|", DOCS.read_text(), re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"(?:^|;) `(\w+)`", labels))) for name, kind, labels in rows}
    metrics = Metrics({"socket": int}, 1)
    metrics.requests.labels(CHAT, 200).inc()
    metrics.refusals.labels(CHAT, "too_large").inc()
    told = {}
    for family in metrics.registry.collect():
        assert family.documentation.endswith(".")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        told[name] = (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
    assert documented == told
