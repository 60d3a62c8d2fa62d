"""Tests of admin.peer_server and of the settings of a fleet: who is heard, and what is refused."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from microturn.admin.fleet import Fleet
from microturn.admin.peer_connection import PeerConnection
from microturn.errors import InvalidArgument, PermissionDenied
from microturn.settings import Settings
from support.fleet_servers import Server, StartServers, go_on, open_session
from support.snapshots import RESUME


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/", b"", "INVALID_ARGUMENT"),
        ("POST", "/find", b"[]", "INVALID_ARGUMENT"),
        ("POST", "/find", b'{"id": [1]}', "INVALID_ARGUMENT"),
        ("POST", "/find", b"x" * 200_000, "INVALID_ARGUMENT"),
        ("PUT", "/kv/1", b"", "INVALID_ARGUMENT"),
        ("PUT", "/kv/1", b"\xff" * 5_000_000, "INVALID_ARGUMENT"),
        ("PUT", "/kv/1", (2).to_bytes(8, "little") + b"{}", "INVALID_ARGUMENT"),
        ("PUT", "/sessions/", b"", "INVALID_ARGUMENT"),
        ("PUT", "/sessions/1", b"\x00" * 5_000_000, "INVALID_ARGUMENT"),
    ],
)
def test_what_is_no_session_is_refused(two: list[Server], method: str, path: str, body: bytes, code: str) -> None:
    request = urllib.request.Request(f"http://{two[0].address}{path}", body or None, method=method)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert json.loads(caught.value.read())["error"]["code"] == code
    assert two[0].ids() == set()


def test_only_who_has_the_key_is_heard(start_servers: StartServers, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("a secret of the fleet\n")
    here, there = start_servers(2, key_file=str(key_file))
    history = open_session(here, 1)
    here.do("move", id="1")
    go_on(there, 1, history, **RESUME)
    port = int(there.address.rpartition(":")[2])
    for key in ("", "another secret of a fleet"):
        with (
            closing(PeerConnection(("127.0.0.1", port), key, 5.0)) as connection,
            pytest.raises(PermissionDenied, match="peer_key_file"),
        ):
            connection.ask("GET", "/load", [])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peer_address": "0.0.0.0:5000"}, "peer_key_file"),
        ({"peer_address": "here"}, "not host:port"),
        ({"peer_address": "127.0.0.1:5000", "peers": "a:b"}, "setting 'peers'"),
        ({"peer_address": "127.0.0.1:5000", "peer_key_file": "/nowhere"}, "cannot be read"),
        ({"peers": "127.0.0.1:5000"}, "needs a peer_address"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Fleet.of(Settings(**settings))


@pytest.mark.parametrize("length", ["-1", "many", ""])
def test_a_body_without_an_end_is_refused(two: list[Server], length: str) -> None:
    """A negative length had all read that came, whoever sent it."""
    host, port = two[0].address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"PUT /kv/1 HTTP/1.1\r\ncontent-length: {length}\r\n\r\n".encode() + b"x" * 1000)
        answer = connection.recv(10_000)
    assert answer.startswith(b"HTTP/1.1 403 ")
