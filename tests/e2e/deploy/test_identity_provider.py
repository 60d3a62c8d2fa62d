"""The edge with keys that an identity provider publishes: the chart's configuration, real Envoy, real HTTPS."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from microturn_client import Client, PermissionDenied, Recovery
from support.certificates import Authority
from support.chart import envoy_of
from support.edge import Edge, TokenIssuer
from support.served import Start

HASTY = Recovery(give_up_opening_s=2.0)
NAME, AUDIENCE = "https://login.example/", "sessions"


@pytest.fixture
def provider(tmp_path: Path, authority: Authority, issuer: TokenIssuer) -> Iterator[str]:
    """The address of the keys."""
    published = tmp_path / "published"
    published.mkdir()
    (published / "jwks.json").write_text(issuer.jwks())
    certificate, key = authority.issue(tmp_path, "DNS:localhost")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(published))) as server:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_address[1]}/jwks.json"
        server.shutdown()
        thread.join()


def test_tokens_of_an_identity_provider_are_checked_by_its_keys(
    start_tiny: Start, provider: str, authority: Authority, issuer: TokenIssuer, tmp_path: Path
) -> None:
    served = start_tiny("--set", "num_threads=1")
    served.wait_until_ready(120)
    (tmp_path / "edge" / "secrets").mkdir(parents=True)
    authority.issue(tmp_path / "edge" / "secrets")
    values = f"issuer={NAME},audiences[0]={AUDIENCE},jwksUri={provider},trustedCa={authority.certificate}"
    config = envoy_of("--set", ",".join(f"edge.tokens.{value}" for value in values.split(",")))

    def client_with(token: str) -> Client:
        return Client(edge.address, credentials=authority.credentials(token), recovery=HASTY)

    with closing(Edge(tmp_path / "edge", config)) as edge:
        edge.serve([served])
        edge.wait_for_healthy(1)
        with client_with(issuer.issue("a tenant", audience=AUDIENCE, name=NAME)) as client, client.session() as session:
            assert session.append("Hello there, all").context_len > 0
        stranger = TokenIssuer(tmp_path / "stranger.key")
        for token, reason in (
            (stranger.issue("a tenant", audience=AUDIENCE, name=NAME), "Jwt verification fails"),
            (issuer.issue("a tenant", audience=AUDIENCE), "Jwt issuer is not configured"),
        ):
            with client_with(token) as client, pytest.raises(PermissionDenied, match=reason):
                client.session().append("Hello")
