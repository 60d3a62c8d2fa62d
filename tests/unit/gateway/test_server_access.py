"""The way to the server: TLS, a client certificate, a token and headers, on a real gRPC channel."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from microturn_client import AsyncClient, Recovery, Unavailable
from microturn_client._messages_pb2 import ModelReadyRequest, ModelReadyResponse
from microturn_gateway.server_access import ServerAccess
from support.certificates import Authority


@dataclass
class Guarded(grpc.GenericRpcHandler):
    """A server that wants certificates of this authority, and says that its model is ready."""

    authority: Authority
    directory: Path
    address: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        self.seen.append(dict(call.invocation_metadata))
        return grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: ModelReadyResponse(ready=True),
            request_deserializer=ModelReadyRequest.FromString,
            response_serializer=ModelReadyResponse.SerializeToString,
        )

    @contextmanager
    def running(self) -> Iterator[Guarded]:
        certificate, key = self.authority.issue(self.directory)
        credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), certificate.read_bytes())], self.authority.certificate.read_bytes(), True
        )
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=1), handlers=[self])
        self.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
        server.start()
        try:
            yield self
        finally:
            server.stop(None).wait()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def guarded(tmp_path: Path, authority: Authority) -> Iterator[Guarded]:
    (tmp_path / "server").mkdir()
    with Guarded(authority, tmp_path / "server").running() as guarded:
        yield guarded


@pytest.fixture
def access(tmp_path: Path, authority: Authority) -> dict[str, Path]:
    """What the server takes."""
    (tmp_path / "gateway").mkdir()
    certificate, key = authority.issue(tmp_path / "gateway")
    return {"tls_ca": authority.certificate, "tls_cert": certificate, "tls_key": key}


async def is_ready(guarded: Guarded, access: ServerAccess, address: str | None = None) -> bool:
    options = access.client_options()
    async with AsyncClient(address or guarded.address, **options, recovery=Recovery(give_up_opening_s=1.0)) as client:
        try:
            return await client.ready()
        except Unavailable:
            return False


async def test_with_a_certificate_of_its_own(guarded: Guarded, access: dict[str, Path]) -> None:
    assert await is_ready(guarded, ServerAccess(**access, metadata={"x-microturn-tenant": "web"}))
    [seen] = guarded.seen
    assert seen["x-microturn-tenant"] == "web"
    assert "authorization" not in seen


async def test_a_token_that_is_renewed_is_read_again(guarded: Guarded, access: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("the first\n")
    options = ServerAccess(**access, token_file=file).client_options()
    async with AsyncClient(guarded.address, **options) as client:
        assert await client.ready()
        file.write_text("the second")
        assert await client.ready()
    assert [seen["authorization"] for seen in guarded.seen] == ["Bearer the first", "Bearer the second"]


async def test_a_name_that_is_not_that_of_the_address(guarded: Guarded, access: dict[str, Path]) -> None:
    elsewhere = guarded.address.replace("127.0.0.1", "localhost")
    assert await is_ready(guarded, ServerAccess(**access, tls_name="127.0.0.1"), elsewhere)
    assert not await is_ready(guarded, ServerAccess(**access), elsewhere)


@pytest.mark.parametrize("lacks", [("tls_cert", "tls_key"), ("tls_ca",), ("tls_ca", "tls_cert", "tls_key")])
async def test_who_lacks_a_part_does_not_come_in(
    guarded: Guarded, access: dict[str, Path], lacks: tuple[str, ...]
) -> None:
    """Without an authority of its own, gRPC's list has none that vouches for this server."""
    given = {name: file for name, file in access.items() if name not in lacks}
    assert not await is_ready(guarded, ServerAccess(uses_tls=True, **given))
    assert guarded.seen == []


def test_without_anything_the_client_is_told_nothing() -> None:
    assert ServerAccess().client_options() == {}
