"""Two gateways before the real edge: TLS and a token to the server, and what replicas share without shared memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest
from openai import AsyncOpenAI
from websockets.asyncio.client import connect

from microturn_gateway.server_access import ServerAccess
from support.certificates import Authority
from support.edge import Edge, TokenIssuer
from support.gateway import running_gateway
from support.served import servers_of

TOKEN = "a-token-of-both-replicas"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory, issuer: TokenIssuer) -> Path:
    file = tmp_path_factory.mktemp("gateway") / "server-token"
    file.write_text(issuer.issue("the gateways"))
    return file


@pytest.fixture(scope="module")
def served_edge(edge: Edge, smollm2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with servers_of(smollm2_dir, partial(tmp_path_factory.mktemp, "run"), max_sessions_per_tenant=20) as start:
        served = start()
        served.wait_until_ready(120)
        edge.serve([served])
        edge.wait_for_healthy(1)
        yield edge


@pytest.fixture(scope="module")
def replicas(served_edge: Edge, authority: Authority, token_file: Path) -> Iterator[tuple[str, str]]:
    """The addresses of two gateways that know nothing of each other."""
    run = partial(running_gateway, served_edge.address, token=TOKEN)
    access = ServerAccess(tls_ca=authority.certificate, token_file=token_file)
    with run(server_access=access) as one, run(server_access=access) as other:
        yield one, other


def sdk(address: str) -> AsyncOpenAI:
    return AsyncOpenAI(api_key=TOKEN, base_url=f"http://{address}/v1", max_retries=0, timeout=60)


async def test_a_talk_through_the_edge(replicas: tuple[str, str], served_edge: Edge) -> None:
    one, _ = replicas
    async with sdk(one) as openai:
        messages = [{"role": "user", "content": "What should I plant?"}]
        first = await openai.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=8)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "And in the shade?"},
        ]
        second = await openai.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=8)
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens
    lines = served_edge.wait_for_log('"tenant":"the gateways"')
    assert {json.loads(line)["tenant"] for line in lines} == {"the gateways"}


async def test_a_client_secret_of_one_replica_opens_a_session_at_the_other(replicas: tuple[str, str]) -> None:
    """As long as one header of a handshake carries it, however much it says."""
    one, other = replicas
    instructions = "Be brief. " + " ".join(f"{number * 7919:x}" for number in range(1150))
    async with sdk(one) as openai:
        session = {"type": "realtime", "instructions": instructions, "max_output_tokens": 4}
        secret = await openai.realtime.client_secrets.create(session=session)
    assert 5500 < len(secret.value) <= 6144
    offered = ["realtime", f"openai-insecure-api-key.{secret.value}"]
    async with connect(f"ws://{other}/v1/realtime", subprotocols=offered, proxy=None) as socket:
        assert socket.subprotocol == "realtime"
        created = json.loads(await socket.recv())
    assert created["session"]["instructions"] == instructions


@pytest.mark.parametrize("wrong", ["no token", "expired", "another authority"])
async def test_a_gateway_that_the_edge_does_not_let_in(
    served_edge: Edge, authority: Authority, issuer: TokenIssuer, tmp_path: Path, wrong: str
) -> None:
    """It says so at its health, and to its clients without a word of its own token."""
    token = issuer.issue("the gateways", valid_s=-3600 if wrong == "expired" else 3600)
    (tmp_path / "token").write_text(token)
    if wrong == "another authority":
        authority = Authority(tmp_path / "others")
    file = None if wrong == "no token" else tmp_path / "token"
    access = ServerAccess(tls_ca=authority.certificate, token_file=file)
    with running_gateway(served_edge.address, server_access=access) as address:
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
            health = await http.get("/health")
            models = await http.get("/v1/models")
    assert health.status_code == 503
    assert models.status_code in (403, 503)
    assert token not in models.text


async def test_a_token_that_was_renewed(
    served_edge: Edge, authority: Authority, issuer: TokenIssuer, tmp_path: Path
) -> None:
    """A token of an hour, and gateways that run for weeks."""
    file = tmp_path / "token"
    file.write_text(issuer.issue("the gateways", valid_s=-3600))
    access = ServerAccess(tls_ca=authority.certificate, token_file=file)
    with running_gateway(served_edge.address, server_access=access) as address:
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=60) as http:
            assert (await http.get("/health")).status_code == 503
            file.write_text(issuer.issue("the gateways"))
            assert (await http.get("/health")).status_code == 200
