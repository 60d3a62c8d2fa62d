"""Sessions of one tenant are bounded where a trusted proxy names it in a header, which Triton hands on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from microturn.settings import TENANT_HEADER
from support.raw import RawStream, ids
from support.share import model_server
from support.tiny_model_dir import write_tiny_model

OPTIONS = {"max_tokens": 0}


@pytest.fixture(scope="module")
def tenants_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    with model_server(str(model), "max_sessions_per_tenant=2") as server:
        yield server.address


@pytest.fixture
def stream_of(tenants_server: str) -> Iterator[Callable[[str | None], RawStream]]:
    """Opens a stream as the proxy would, for a tenant or for nobody."""
    with ExitStack() as streams:

        def open_stream(tenant: str | None) -> RawStream:
            headers = [] if tenant is None else [(TENANT_HEADER, tenant)]
            return streams.enter_context(RawStream(tenants_server, headers))

        yield open_stream


def test_a_tenant_has_so_many_sessions_and_another_has_its_own(stream_of: Callable[..., RawStream]) -> None:
    acme, globex = stream_of("acme"), stream_of("globex")
    for session_id in ("first", "second"):
        assert acme.ask(session_id, start=True, input_ids=ids(5), options=OPTIONS).error is None
    third = acme.ask("third", start=True, input_ids=ids(5), options=OPTIONS)
    assert third.code == "RESOURCE_EXHAUSTED"
    assert "retry_after_ms" in (third.error or "")
    # What was refused is the room, not the stream, and only this tenant's.
    assert stream_of("acme").ask("fourth", start=True, input_ids=ids(5), options=OPTIONS).code == "RESOURCE_EXHAUSTED"
    assert globex.ask("of another", start=True, input_ids=ids(5), options=OPTIONS).error is None
    assert stream_of(None).ask("of nobody", start=True, input_ids=ids(5), options=OPTIONS).error is None
    assert acme.ask("first", end=True, input_ids=ids()).error is None
    assert acme.ask("third", start=True, input_ids=ids(5), options=OPTIONS).error is None


def test_a_session_belongs_to_its_tenant(stream_of: Callable[..., RawStream]) -> None:
    initech = stream_of("initech")
    assert initech.ask("ours", start=True, input_ids=ids(5), options=OPTIONS).error is None
    for stream in (stream_of("hooli"), stream_of(None)):
        assert stream.ask("ours", input_ids=ids(6), options=OPTIONS).code == "PERMISSION_DENIED"
    status = initech.ask("ours", end=True, input_ids=ids()).status
    assert status is not None
    assert status["context_len"] == 1


def test_a_client_cannot_name_another_tenant_beside_the_proxy(stream_of: Callable[..., RawStream]) -> None:
    options = OPTIONS | {TENANT_HEADER: "umbrella"}
    answer = stream_of("initrode").ask("disguised", start=True, input_ids=ids(5), options=options)
    assert answer.code == "INVALID_ARGUMENT"
    assert f"'{TENANT_HEADER}' came twice" in (answer.error or "")


def test_without_the_setting_a_tenant_is_refused_as_a_parameter_and_not_read_as_a_header(server: str) -> None:
    with RawStream(server, [(TENANT_HEADER, "acme")]) as stream:
        options = OPTIONS | {TENANT_HEADER: "acme"}
        answer = stream.ask("unasked", start=True, end=True, input_ids=ids(5), options=options)
        assert answer.code == "INVALID_ARGUMENT"
        assert "set max_sessions_per_tenant" in (answer.error or "")
        assert stream.ask("unasked", start=True, end=True, input_ids=ids(5), options=OPTIONS).error is None
