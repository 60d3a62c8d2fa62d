"""Tests of the addresses that Locust's users write, and of what it takes to come in."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from load_tests.load.target import Target, target_of


def target(host: str, **options: str) -> Target:
    return target_of(host, argparse.Namespace(**{"tls_ca": "", "tls_name": "", "token_file": ""} | options))


@pytest.mark.parametrize(
    ("host", "address", "has_tls"),
    [
        ("localhost:8001", "localhost:8001", False),
        ("http://localhost:8001", "localhost:8001", False),
        ("http://localhost:8001/", "localhost:8001", False),
        ("https://sessions.example", "sessions.example:443", True),
        ("https://sessions.example:8443", "sessions.example:8443", True),
        ("http://[::1]:8001", "[::1]:8001", False),
    ],
)
def test_an_address_is_taken_in_every_form(host: str, address: str, has_tls: bool) -> None:
    """Locust's page has http:// before its field for the host, and nobody came in."""
    found = target(host)
    assert (found.address, set(found.options)) == (address, {"credentials"} if has_tls else set())


@pytest.mark.parametrize("host", ["ftp://localhost:8001", "http://", "http://localhost:8001/v2"])
def test_what_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="--host is HOST:PORT"):
        target(host)


def test_a_token_is_not_sent_in_plain_text(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc")
    with pytest.raises(ValueError, match="in plain text"):
        target("http://edge:8443", token_file=str(tmp_path / "token"))


def test_who_names_authorities_wants_tls(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("-----BEGIN CERTIFICATE-----")
    (tmp_path / "token").write_text("abc\n")
    files = {"tls_ca": str(tmp_path / "ca.crt"), "token_file": str(tmp_path / "token")}
    found = target("edge:8443", tls_name="sessions", **files)
    assert found.options["credentials"] is not None
    assert found.options["channel_options"] == {"grpc.ssl_target_name_override": "sessions"}
