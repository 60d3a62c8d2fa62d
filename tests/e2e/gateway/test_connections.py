"""Who may connect, and what becomes of connections that are idle, too loud, slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import time
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from support.gateway import running_gateway
from support.realtime_socket import closed_with, connected, received


@pytest.fixture
def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def refusal_of(address: str, **options: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as refused:
        async with connected(address, **options):
            pass
    response = refused.value.response
    assert response.body is not None
    return response.status_code, json.loads(response.body)["error"]["code"]


async def test_a_browser_comes_with_a_secret(gateway: str, openai: AsyncOpenAI) -> None:
    secret = await openai.realtime.client_secrets.create(
        expires_after={"anchor": "created_at", "seconds": 60},
        session={"type": "realtime", "instructions": "Be brief.", "max_output_tokens": 4},
    )
    assert secret.value.startswith("ek_")
    offered = ["realtime", f"openai-insecure-api-key.{secret.value}"]
    async with connected(gateway, subprotocols=offered, origin=f"http://{gateway}") as socket:
        assert socket.subprotocol == "realtime"
        created = await received(socket)
        assert (created["session"]["instructions"], created["session"]["max_output_tokens"]) == ("Be brief.", 4)
    # It opens sessions and nothing else.
    with pytest.raises(AuthenticationError, match="gateway's token"):
        await openai.with_options(api_key=secret.value).models.list()


async def test_who_may_not_is_told_before_anything_is_opened(gateway: str, bearer: dict[str, str]) -> None:
    assert await refusal_of(gateway) == (401, "invalid_api_key")
    wrong = ["realtime", "openai-insecure-api-key.ek_nothing"]
    assert await refusal_of(gateway, subprotocols=wrong) == (401, "invalid_client_secret")
    evil = {"origin": "https://evil.example", "additional_headers": bearer}
    assert await refusal_of(gateway, **evil) == (403, "origin_not_allowed")
    async with connected(gateway, origin="https://app.example", additional_headers=bearer) as socket:
        assert (await received(socket))["type"] == "session.created"


async def test_a_model_that_is_not_here_is_refused(gateway: str, bearer: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://{gateway}/v1/realtime?model=gpt-8", proxy=None, additional_headers=bearer)
    assert refused.value.response.status_code == 404


async def test_a_session_under_another_name_of_the_model(server: str) -> None:
    with running_gateway(server, served_model_names=("gpt-realtime",)) as address:
        async with AsyncOpenAI(api_key="none", base_url=f"http://{address}/v1", max_retries=0, timeout=60) as openai:
            assert [model.id async for model in openai.models.list()] == ["smollm2-135m", "gpt-realtime"]
            assert (await openai.models.retrieve("gpt-realtime")).id == "gpt-realtime"
            async with openai.realtime.connect(model="gpt-realtime") as connection:
                assert (await connection.recv()).session.model == "gpt-realtime"
            answer = await openai.chat.completions.create(
                model="gpt-realtime", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
            )
            assert answer.model == "gpt-realtime"


async def test_a_message_that_is_too_long_ends_the_connection(gateway: str, bearer: dict[str, str]) -> None:
    async with connected(gateway, additional_headers=bearer) as socket:
        await received(socket)
        await socket.send("x" * 300_000)
        assert (await closed_with(socket))[0] == 1009


def test_a_connection_that_rests_is_closed_by_its_client_first(gateway: str, token: str) -> None:
    """OpenAI's library keeps one for 5 s: were the gateway to close it then, a request on its way would be lost."""
    with contextlib.closing(http.client.HTTPConnection(gateway, timeout=30)) as connection:
        statuses = []
        for rest_s in (0, 6):
            time.sleep(rest_s)
            connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {token}"})
            with connection.getresponse() as response:
                response.read()
            statuses.append(response.status)
    assert statuses == [200, 200]


async def test_who_says_nothing_for_long_has_to_go(server: str) -> None:
    with running_gateway(server, idle_timeout_s=0.3) as address:
        async with connected(address) as socket:
            await received(socket)
            assert (await received(socket))["error"]["code"] == "session_idle"
            assert await closed_with(socket) == (1000, "session_idle")


async def test_who_vanishes_in_the_middle_of_an_answer_frees_the_place(server: str) -> None:
    with running_gateway(server, max_sessions=1) as address:
        async with connected(address) as socket:
            await received(socket)
            assert await refusal_of(address) == (429, "too_many_sessions")
            await socket.send('{"type": "input_text_buffer.append", "text": "Tell me a long story."}')
            endless = {"max_output_tokens": 1500, "microturn": {"ignore_eos": True}}
            await socket.send(json.dumps({"type": "response.create", "response": endless}))
            while (await received(socket))["type"] != "response.output_text.delta":
                pass
            socket.transport.abort()
        async with asyncio.timeout(20):  # 1,500 tokens would take longer
            while True:
                try:
                    async with connected(address) as socket:
                        assert (await received(socket))["type"] == "session.created"
                        break
                except InvalidStatus:
                    await asyncio.sleep(0.05)


async def test_who_does_not_read_is_not_listened_to_and_has_to_go(server: str) -> None:
    with running_gateway(server, send_timeout_s=0.5) as address:
        async with connected(address, max_queue=1, compression=None) as socket:
            update = json.dumps({"type": "session.update", "session": {"instructions": "x" * 200_000}})
            num_sent = 0
            try:
                while num_sent < 1000:  # 200 MB, were they taken
                    await socket.send(update)
                    num_sent += 1
            except ConnectionClosed:
                pass
            assert num_sent < 200


async def test_a_server_that_is_not_there_is_said_so() -> None:
    with running_gateway("127.0.0.1:1") as address:
        assert await refusal_of(address) == (503, "unavailable")
