"""The HTTP API before a fake server: errors of every path and method, models by name, health, and other origins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from microturn_client.testing import FakeServer
from microturn_gateway import app
from microturn_gateway.sessions import Sessions
from microturn_gateway.settings import GatewaySettings

TOKEN = "a-token-of-some-length"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PAGE = {"origin": "https://app.example"}
ASKS = {**PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization, x-any"}

Opened = Callable[..., TestClient]


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def opened(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens a gateway of these settings."""
    monkeypatch.setattr(app, "AsyncClient", lambda _address: server.async_client())

    def open_it(**settings: Any) -> TestClient:
        gateway = app.build_app(GatewaySettings(**settings))
        return TestClient(gateway, base_url="http://localhost:8080", raise_server_exceptions=False)

    return open_it


def error_of(response: Any) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"type", "code", "message", "param"}
    return error


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/embeddings", "/v1/audio/speech", "/v1/chat"])
def test_a_path_that_is_not_here(opened: Opened, method: str, path: str) -> None:
    response = opened().request(method, path)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert f"{method} {path} " in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/fake", "GET, HEAD"),
        ("GET", "/v1/realtime/client_secrets", "POST"),
        ("OPTIONS", "/v1/chat/completions", "POST"),
    ],
)
def test_a_method_that_is_not_there(opened: Opened, method: str, path: str, allowed: str) -> None:
    response = opened().request(method, path)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_supported")
    assert ", ".join(sorted(response.headers["allow"].split(", "))) == allowed


def test_a_web_socket_says_that_it_is_one(opened: Opened) -> None:
    response = opened().get("/v1/realtime")
    assert (response.status_code, error_of(response)["code"]) == (426, "websocket_required")
    assert response.headers["upgrade"] == "websocket"


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}, "messages"),
        ("/v1/responses", {"input": [{"role": "user", "content": ""}]}, "input"),
    ],
)
def test_a_conversation_without_text_is_refused_by_name(opened: Opened, path: str, asked: Any, param: str) -> None:
    response = opened().post(path, json=asked)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_value")
    assert error_of(response)["param"] == param


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/chat/completions", 405), ("POST", "/responses", 405), ("GET", "/models", 404)],
)
def test_a_base_url_that_lacks_its_last_part(opened: Opened, method: str, path: str, status: int) -> None:
    """The page's files are looked for there."""
    response = opened().request(method, path)
    assert response.status_code == status
    assert "begin with /v1" in error_of(response)["message"]


def test_a_web_socket_that_is_not_there(opened: Opened) -> None:
    with pytest.raises(WebSocketDisconnect) as refused, opened().websocket_connect("/v1/nothing"):
        pass
    assert refused.value.status_code == 404
    assert error_of(refused.value)["code"] == "unknown_url"


def test_a_fault_of_ours_has_the_shape_too(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_sessions: Sessions) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Sessions, "models", fail)
    response = opened(allowed_origins=(PAGE["origin"],)).get("/v1/models", headers=PAGE)
    assert (response.status_code, error_of(response)["type"]) == (500, "server_error")
    assert response.headers["access-control-allow-origin"] == PAGE["origin"]  # or the page could not read it


def test_the_page_is_still_there(opened: Opened) -> None:
    assert "text/html" in opened().get("/").headers["content-type"]
    assert opened().get("/nothing").status_code == 404


def test_a_model_under_all_its_names(opened: Opened) -> None:
    gateway = opened(served_model_names=("gpt-4o", "org/model", "fake"))
    listed = gateway.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["fake", "gpt-4o", "org/model"]
    for model in listed:
        assert gateway.get(f"/v1/models/{model['id']}").json() == model
    assert gateway.get("/v1/models/org%2Fmodel").json()["id"] == "org/model"
    assert listed[1] == {"id": "gpt-4o", "object": "model", "created": 0, "owned_by": "microturn", "max_context": 8192}


def test_a_model_without_a_name_is_none(opened: Opened) -> None:
    response = opened().get("/v1/models/")
    assert (response.status_code, error_of(response)["code"]) == (404, "unknown_url")


def test_a_model_that_is_not_here(opened: Opened) -> None:
    gateway = opened(served_model_names=("gpt-4o",))
    for response in (
        gateway.get("/v1/models/gpt-8"),
        gateway.get("/v1/models/gpt-4o/"),
        gateway.post("/v1/chat/completions", json={"model": "gpt-8", "messages": [{"role": "user", "content": "Hi"}]}),
    ):
        error = error_of(response)
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "'fake', 'gpt-4o'" in error["message"]


@pytest.mark.parametrize(("asked", "told"), [("gpt-4o", "gpt-4o"), ("fake", "fake"), (None, "fake")])
def test_who_asks_by_a_name_is_answered_by_it(opened: Opened, asked: str | None, told: str) -> None:
    gateway = opened(served_model_names=("gpt-4o",))
    request = {"model": asked, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert gateway.post("/v1/chat/completions", json=request).json()["model"] == told


def test_the_models_want_the_token_and_health_does_not(opened: Opened, server: FakeServer) -> None:
    gateway = opened(token=TOKEN)
    assert error_of(gateway.get("/v1/models/fake"))["code"] == "invalid_api_key"
    assert gateway.get("/v1/models/fake", headers=BEARER).status_code == 200
    health = gateway.get("/health", headers={"host": "10.0.0.7:8080"})
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    server.go_down()
    assert error_of(gateway.get("/health"))["code"] == "unavailable"
    server.come_back()
    assert gateway.head("/health").status_code == 200


def test_a_page_that_is_allowed_may_ask_and_read(opened: Opened) -> None:
    gateway = opened(token=TOKEN, allowed_origins=(PAGE["origin"],))
    preflight = gateway.options("/v1/chat/completions", headers=ASKS)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "authorization, x-any"
    for response, status in (
        (gateway.get("/v1/models", headers={**PAGE, **BEARER}), 200),
        (gateway.get("/v1/models", headers=PAGE), 401),
        (gateway.get("/v1/nothing", headers=PAGE), 404),
    ):
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, PAGE["origin"])


@pytest.mark.parametrize("allowed", [(), (PAGE["origin"],)])
def test_a_page_that_is_not_allowed_may_not(opened: Opened, allowed: tuple[str, ...]) -> None:
    gateway = opened(allowed_origins=allowed)
    evil = {"origin": "https://evil.example"}
    preflight = gateway.options("/v1/models", headers={**ASKS, **evil})
    assert preflight.status_code == (403 if allowed else 405)
    response = gateway.get("/v1/models", headers=evil)
    assert (response.status_code, error_of(response)["code"]) == (403, "origin_not_allowed")
    for told in (preflight, response):
        error_of(told)
        assert "access-control-allow-origin" not in told.headers


@pytest.mark.parametrize(
    ("session", "status", "code", "param"),
    [
        ({"model": "gpt-8"}, 404, "model_not_found", "session.model"),
        ({"microturn": {"window_tokens": 9}}, 400, "invalid_value", "session.microturn.window_tokens"),
    ],
)
def test_a_secret_of_a_session_that_none_can_be(
    opened: Opened, session: dict[str, Any], status: int, code: str, param: str
) -> None:
    gateway = opened(served_model_names=("gpt-4o",))
    told = gateway.post("/v1/realtime/client_secrets", json={"session": {"model": "gpt-4o"}}).json()["session"]
    assert told["model"] == "gpt-4o"
    refused = gateway.post("/v1/realtime/client_secrets", json={"session": session})
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["param"]) == (status, code, param)


def test_a_secret_of_a_session_that_is_not_to_be_had_is_refused_whole(opened: Opened) -> None:
    session = {"type": "realtime", "instructions": "Be brief.", "audio": {"output": {"voice": "cedar"}}}
    gateway = opened()
    told = gateway.post("/v1/realtime/client_secrets", json={"session": session}).json()["session"]
    assert told.items() >= session.items()
    refused = gateway.post("/v1/realtime/client_secrets", json={"session": {**session, "voice": "ash"}})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "session.voice")
