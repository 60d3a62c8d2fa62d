"""Real gateways on real ports before a fake server: what two of them share, and how much one of them takes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import httpx2
import pytest
from websockets.exceptions import InvalidStatus

from microturn_client.testing import FakeServer
from microturn_gateway import app
from support.gateway import running_gateway
from support.realtime_socket import connected, received

TOKEN = "a-token-of-both-replicas"
SERVER = "localhost:8001"


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "AsyncClient", lambda _address: FakeServer().async_client())


async def secret_of(address: str, session: dict[str, Any]) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=f"http://{address}") as http:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        return await http.post("/v1/realtime/client_secrets", headers=bearer, json={"session": session})


async def test_the_longest_secret_of_one_replica_opens_a_session_at_the_other() -> None:
    """A header of a handshake has 8,192 bytes at most: what is beyond that is refused when the secret is made."""
    with running_gateway(SERVER, token=TOKEN) as one, running_gateway(SERVER, token=TOKEN) as other:
        num_words, longest = 1100, None
        while True:
            num_words += 10
            instructions = " ".join(f"{number * 7919:x}" for number in range(num_words))
            made = await secret_of(one, {"instructions": instructions})
            if made.status_code != 200:
                break
            longest = made.json()
        assert made.json()["error"]["code"] == "too_large"
        assert longest is not None
        assert len(longest["value"]) > 6000
        offered = ["realtime", f"openai-insecure-api-key.{longest['value']}"]
        async with connected(other, subprotocols=offered, origin=f"http://{other}") as socket:
            created = await received(socket)
        assert created["session"]["instructions"] == longest["session"]["instructions"]


async def test_replicas_of_different_keys_do_not_take_each_others_secrets() -> None:
    keys = ["one of thirty-two characters, or more", "two of thirty-two characters, or more"]
    with running_gateway(SERVER, token=TOKEN, secret_key=keys[0]) as one:
        secret = (await secret_of(one, {})).json()["value"]
        with running_gateway(SERVER, token=TOKEN, secret_key=keys[1]) as other:
            for address, is_good in ((one, True), (other, False)):
                opened = connected(address, additional_headers={"authorization": f"Bearer {secret}"})
                if is_good:
                    async with opened as socket:
                        assert (await received(socket))["type"] == "session.created"
                    continue
                with pytest.raises(InvalidStatus) as refused:
                    async with opened:
                        pass
                assert refused.value.response.status_code == 401


async def test_as_many_sessions_as_the_setting_says() -> None:
    with running_gateway(SERVER, max_sessions=150) as address:
        async with AsyncExitStack() as sockets:
            for _ in range(150):
                await sockets.enter_async_context(connected(address))
            with pytest.raises(InvalidStatus) as refused:
                async with connected(address):
                    pass
        assert refused.value.response.status_code == 429
