"""Who comes through the edge, and what those are told who do not: real server, real Envoy, TLS, bearer tokens."""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from microturn_client import AsyncClient, Client, MicroturnError, PermissionDenied, Recovery, Unavailable
from support.certificates import Authority
from support.edge import DEPLOY, Edge, TokenIssuer
from support.programs import CERTIFICATES, EDGE, printed_by, programs_for
from support.served import Served, Start

HASTY = Recovery(give_up_opening_s=2.0)  # a handshake takes its time on a busy machine


@dataclass(frozen=True)
class Door:
    """The edge with a server behind it, and what it takes to come in."""

    edge: Edge
    authority: Authority
    issuer: TokenIssuer
    served: Served

    def credentials(self, token: str | None = None, authority: Authority | None = None) -> grpc.ChannelCredentials:
        token = self.issuer.issue("a tenant") if token is None else token
        return (authority or self.authority).credentials(token)

    def error(self, credentials: grpc.ChannelCredentials | None) -> MicroturnError:
        """What a first turn ends with."""
        with Client(self.edge.address, credentials=credentials, recovery=HASTY) as client, client.session() as session:
            with pytest.raises(MicroturnError) as caught:
                session.append("Hello")
            assert str(session.id) not in str(caught.value)
            return caught.value


@pytest.fixture(scope="module")
def door(start_tiny: Start, edge: Edge, authority: Authority, issuer: TokenIssuer) -> Iterator[Door]:
    served = start_tiny("--set", "max_sessions_per_tenant=2")
    served.wait_until_ready(60)
    edge.serve([served])
    edge.wait_for_healthy(1)
    return Door(edge, authority, issuer, served)


def test_a_session_through_the_edge(door: Door) -> None:
    with Client(door.edge.address, credentials=door.credentials()) as client, client.session() as session:
        assert client.model_info().protocol_version == 1
        assert session.append("Hello there, all").context_len > 0
        branch = session.fork()
        assert branch.append(" and one more").context_len > session.context_len
        # The edge said where the session is; a branch is there too.
        assert session._core.requests.route
        assert branch._core.requests.route == session._core.requests.route


def test_the_program_of_the_docs_comes_through_the_edge(door: Door) -> None:
    (program,) = programs_for(EDGE).values()
    for written, here in (
        (EDGE, door.edge.address),
        ("deploy/secrets/tls.crt", str(door.authority.certificate)),
        ("the token", door.issuer.issue("a tenant")),
    ):
        assert program.count(f'"{written}"') == 1
        program = program.replace(f'"{written}"', repr(here))
    assert printed_by(program).endswith(" tokens of context\n")


def test_the_program_of_the_docs_makes_credentials(door: Door, tmp_path: Path) -> None:
    (program,) = programs_for(CERTIFICATES).values()
    certificate, key = door.authority.issue(tmp_path)
    for written, here in (("ca.crt", door.authority.certificate), ("client.key", key), ("client.crt", certificate)):
        assert program.count(f'"{written}"') == 1
        program = program.replace(f'"{written}"', repr(str(here)))
    printed_by(program)


def test_the_edge_adds_little(door: Door) -> None:
    """Keep-alives, there and back, in alternation; TLS included. On a quiet machine it is 0.5 ms and less.

    Few enough that their answers are not paced.
    """
    took_ms: dict[str, list[float]] = {"edge": [], "server": []}
    with (
        Client(door.edge.address, credentials=door.credentials()) as by_edge,
        Client(door.served.address) as direct,
        by_edge.session() as at_edge,
        direct.session() as at_server,
    ):
        for _ in range(80):
            for name, session in (("edge", at_edge), ("server", at_server)):
                begun_s = time.perf_counter()
                session.append([])
                took_ms[name].append(1e3 * (time.perf_counter() - begun_s))
    p50 = {name: statistics.median(values) for name, values in took_ms.items()}
    print(f"p50: {p50['server']:.2f} ms, through the edge {p50['edge']:.2f} ms")
    assert p50["edge"] - p50["server"] < 10


async def test_with_asyncio_too(door: Door) -> None:
    async with AsyncClient(door.edge.address, credentials=door.credentials()) as client, client.session() as session:
        assert (await session.append("Hello there, all")).context_len > 0
        assert session._core.requests.route


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        ("", "Jwt is missing"),
        ("no token at all", "Jwt is not in the form"),
        ("wrong key", "Jwt verification fails"),
        ("expired", "Jwt is expired"),
        ("of another service", "Audiences in Jwt are not allowed"),
        ("of nobody", "RBAC: access denied"),
    ],
)
def test_without_a_valid_token_nobody_comes_in(door: Door, tmp_path: Path, token: str, reason: str) -> None:
    made = {
        "wrong key": lambda: TokenIssuer(tmp_path / "other.key").issue("a tenant"),
        "expired": lambda: door.issuer.issue("a tenant", valid_s=-3600),
        "of another service": lambda: door.issuer.issue("a tenant", audience="billing"),
        # It had sessions without a tenant, and so without a bound.
        "of nobody": lambda: door.issuer.issue(""),
    }
    error = door.error(door.credentials(made[token]() if token in made else token))
    assert isinstance(error, PermissionDenied)
    assert reason in str(error)


def test_who_is_signed_by_somebody_else_is_not_believed(door: Door, tmp_path: Path) -> None:
    error = door.error(door.credentials(authority=Authority(tmp_path / "others")))
    assert isinstance(error, Unavailable)
    assert "CERTIFICATE_VERIFY_FAILED" in str(error)


def test_plain_text_to_the_tls_port_is_refused(door: Door) -> None:
    error = door.error(None)
    assert isinstance(error, Unavailable)
    assert "credentials=" in str(error)


def test_tls_to_a_plain_port_is_refused(door: Door) -> None:
    """A client that was told to use TLS never falls back to plain text."""
    with Client(door.served.address, credentials=door.credentials(), recovery=HASTY) as client:
        session = client.session()
        with pytest.raises(Unavailable, match=r"(?i)ssl|tls"):
            session.append("Hello")


def test_a_stolen_session_id_opens_nothing(door: Door) -> None:
    with Client(door.edge.address, credentials=door.credentials()) as client, client.session() as session:
        session.append("A secret of ours")
        for key in ("guessed", None):
            with client.session(session_id=session.id, session_key=key, resume=True) as thief:
                with pytest.raises(PermissionDenied) as caught:
                    thief.append("What was said?")
                assert "secret" not in str(caught.value).removeprefix("A")
            with client.session(fork_of=str(session.id), session_key=key) as thief, pytest.raises(MicroturnError):
                thief.append("What was said?")
        assert session.append(" and more of it").context_len > 0


def test_a_tenant_is_who_the_token_says(door: Door) -> None:
    """The server counts sessions by the token's subject, not by what a client claims to be."""
    metadata = (("x-microturn-tenant", "somebody else"), ("x-session-id", "one of three"))
    credentials = door.credentials(door.issuer.issue("one with two sessions"))
    with grpc.secure_channel(door.edge.address, credentials) as channel:
        triton = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        errors = [
            response.error_message
            for number in range(1, 4)
            for response in triton.ModelStreamInfer(iter([_start(number)]), metadata=metadata, timeout=30)
        ]
    assert errors[:2] == ["", ""]
    assert errors[2].startswith("RESOURCE_EXHAUSTED")
    logged = door.edge.wait_for_log('"session":"one of three"')
    assert {json.loads(line)["tenant"] for line in logged} == {"one with two sessions"}


def test_what_is_logged_says_nothing_of_keys_and_texts(door: Door) -> None:
    token = door.issuer.issue("a quiet tenant")
    with Client(door.edge.address, credentials=door.credentials(token)) as client, client.session() as session:
        session.append("not for the log")
        key = session._core.requests.key
    assert door.edge.wait_for_log("a quiet tenant")
    log = door.edge.log.read_text() + "\n".join(door.served.said)
    assert not any(word in log for word in (token, str(key), "not for the log"))


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="streaming_llm")),
        ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
        ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(name="x", key="/x", byte_size=1)),
        ("LogSettings", service_pb2.LogSettingsRequest()),
        ("TraceSetting", service_pb2.TraceSettingRequest()),
    ],
)
def test_the_servers_own_management_stays_inside(door: Door, method: str, request_: object) -> None:
    with grpc.secure_channel(door.edge.address, door.credentials()) as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        with pytest.raises(grpc.RpcError) as caught:
            call(request_, timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def _start(sequence_id: int) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="streaming_llm", id="1")
    request.parameters["sequence_id"].int64_param = sequence_id
    request.parameters["sequence_start"].bool_param = True
    request.inputs.add(name="input_ids", datatype="INT32", shape=[1, 0])
    request.raw_input_contents.append(b"")
    return request


def test_an_edge_that_is_short_of_memory_refuses_sessions_and_is_not_started_again(
    door: Door, tmp_path: Path, authority: Authority, issuer: TokenIssuer
) -> None:
    """It refused whoever asked whether it is ready too, and was killed with all its streams."""
    (tmp_path / "secrets").mkdir()
    authority.issue(tmp_path / "secrets")
    (tmp_path / "secrets" / "jwks.json").write_text(issuer.jwks())
    text = (DEPLOY / "envoy" / "envoy.yaml").read_text()
    assert text.count("max_heap_size_bytes: 805306368") == 1
    with closing(
        Edge(tmp_path, text.replace("max_heap_size_bytes: 805306368", "max_heap_size_bytes: 1000000"))
    ) as edge:
        edge.serve([door.served])
        deadline_s = time.monotonic() + 30
        while "envoy_overload_envoy_overload_actions_stop_accepting_requests_active{} 1" not in edge.stats():
            assert time.monotonic() < deadline_s, [line for line in edge.stats().splitlines() if "overload" in line]
            time.sleep(0.1)
        with urllib.request.urlopen(f"http://{edge.metrics_address}/ready", timeout=5) as ready:
            assert ready.status == 200
        with Client(edge.address, credentials=door.credentials(), recovery=HASTY) as client, pytest.raises(Unavailable):
            client.session().append("Hello")
