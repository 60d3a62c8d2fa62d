import math

import grpc
import pytest

from microturn_client import AsyncClient, Client, InvalidArgument
from microturn_client._endpoint import endpoint

SECRET = "a.bearer.token"


def test_without_arguments_and_environment_it_is_triton_on_this_machine():
    found = endpoint(environment={})
    assert (found.address, found.credentials, found.metadata) == ("localhost:8001", None, ())


def test_the_environment_says_what_arguments_do_not():
    environment = {"MICROTURN_ADDRESS": "127.0.0.1:9", "MICROTURN_TOKEN": SECRET}
    found = endpoint(environment=environment)
    assert found.address == "127.0.0.1:9"
    assert found.metadata == (("authorization", f"Bearer {SECRET}"),)
    said = endpoint("[::1]:7", token="another", environment=environment)
    assert said.address == "[::1]:7"
    assert said.metadata == (("authorization", "Bearer another"),)
    by_metadata = endpoint(metadata={"Authorization": "Basic eA=="}, environment=environment)
    assert by_metadata.metadata == (("authorization", "Basic eA=="),)


def test_an_empty_variable_is_none():
    assert endpoint(environment={"MICROTURN_ADDRESS": "", "MICROTURN_TOKEN": "", "MICROTURN_CA_FILE": ""}) == endpoint(
        environment={}
    )


def test_a_file_of_authorities_is_tls(tmp_path):
    file = tmp_path / "ca.pem"
    file.write_text("not looked at before there is a connection")
    found = endpoint("far.example:8001", environment={"MICROTURN_CA_FILE": str(file), "MICROTURN_TOKEN": SECRET})
    assert isinstance(found.credentials, grpc.ChannelCredentials)
    given = grpc.ssl_channel_credentials()
    assert endpoint(credentials=given, environment={"MICROTURN_CA_FILE": "/nowhere"}).credentials is given
    with pytest.raises(InvalidArgument, match="MICROTURN_CA_FILE"):
        endpoint(environment={"MICROTURN_CA_FILE": str(tmp_path / "none.pem")})


@pytest.mark.parametrize("address", ["far.example:8001", "10.0.0.1:8001", "[2001:db8::1]:8001", "dns:///far:1"])
def test_a_token_does_not_leave_the_machine_in_plain_text(address):
    with pytest.raises(InvalidArgument, match="TLS") as refused:
        endpoint(address, token=SECRET, environment={})
    assert SECRET not in str(refused.value)
    assert endpoint(address, token=SECRET, credentials=grpc.ssl_channel_credentials(), environment={}).metadata


@pytest.mark.parametrize(
    "address", ["localhost:8001", "127.0.0.1:1", "127.9.9.9:1", "[::1]:8001", "unix:///run/x.sock"]
)
def test_on_the_machine_it_may(address):
    assert endpoint(address, token=SECRET, environment={}).metadata


@pytest.mark.parametrize(
    "metadata",
    [
        {"x-session-id": "5"},
        {"X-Session-Route": "a"},
        {"grpc-timeout": "1S"},
        {"with space": "a"},
        {"": "a"},
        {"x-a": "ä"},
        {"x-a": "a\n"},
        {"x-a": b"bytes"},
        {"x-a-bin": "text"},
        {"x-a": 3},
    ],
)
def test_metadata_that_cannot_be_sent_is_refused(metadata):
    with pytest.raises(InvalidArgument, match="metadata"):
        endpoint(metadata=metadata, environment={})


def test_a_token_said_twice_is_refused():
    with pytest.raises(InvalidArgument, match="authorization"):
        endpoint(token=SECRET, metadata={"authorization": "Basic eA=="}, environment={})


def test_a_token_that_no_header_can_carry_is_refused_without_being_shown():
    with pytest.raises(InvalidArgument) as refused:
        endpoint(token=f"{SECRET}\n", environment={})
    assert SECRET not in str(refused.value)


def test_channel_options_replace_those_of_the_client():
    options = dict(
        endpoint(channel_options={"grpc.keepalive_time_ms": 1000, "grpc.x": "y"}, environment={}).channel_options
    )
    assert options["grpc.keepalive_time_ms"] == 1000
    assert options["grpc.x"] == "y"
    assert options["grpc.max_receive_message_length"] == -1


def test_metadata_and_channel_options_are_those_of_every_stream(server):
    options = {
        "metadata": {"X-Tenant": "a", "x-trace-bin": b"\1"},
        "channel_options": {"grpc.primary_user_agent": "me"},
    }
    with Client(server.address, **options) as client, client.session(session_id="s") as session:
        session.append([1])
    [metadata] = server.metadata
    assert (metadata["x-tenant"], metadata["x-trace-bin"], metadata["x-session-id"]) == ("a", b"\1", "s")
    assert metadata["user-agent"].startswith("me ")


async def test_metadata_and_channel_options_are_those_of_every_stream_for_asyncio(server, monkeypatch):
    monkeypatch.setenv("MICROTURN_ADDRESS", server.address)
    monkeypatch.setenv("MICROTURN_TOKEN", SECRET)
    async with AsyncClient(channel_options={"grpc.primary_user_agent": "me"}) as client, client.session() as session:
        await session.append([1])
        assert await client.ready()
    assert [metadata["authorization"] for metadata in server.metadata] == [f"Bearer {SECRET}"]
    assert server.metadata[0]["user-agent"].startswith("me ")
    assert server.ready_metadata[-1]["authorization"] == f"Bearer {SECRET}"


def test_a_client_says_whether_its_server_is_ready(server):
    with Client(server.address) as client:
        assert client.ready()
        server.is_ready = False
        assert not client.ready()
        server.stop()
        assert not client.ready()
    with Client("127.0.0.1:1") as client:
        assert not client.ready(timeout_s=1.0)


async def test_who_waits_for_ever_is_answered(server):
    """Of infinitely many seconds gRPC made a time that had passed."""
    with Client(server.address, timeout_s=math.inf) as client:
        assert client.model_info().protocol_version == 1
        assert client.ready(math.inf)
    async with AsyncClient(server.address, timeout_s=math.inf) as client:
        assert (await client.model_info()).protocol_version == 1
        assert await client.ready(math.inf)
