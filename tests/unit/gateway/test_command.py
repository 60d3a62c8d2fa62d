"""`microturn gateway` refuses what it cannot serve, in one line."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from microturn_gateway.arguments import add_gateway_arguments, settings_from
from microturn_gateway.command import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "can be reached from outside"),
        (["--max-sessions", "0"], "max_sessions must be above 0"),
        (["--token-file", "/nowhere"], "No such file"),
        (["--secret-key-file", "/dev/null"], "is empty"),
        (["--server-token-file", "/nowhere"], "give --server-tls"),
        (["--server-tls-cert", "/nowhere", "--server-tls"], "--server-tls-key"),
        (["--server-tls-ca", "/nowhere", "--port", "0"], "No such file"),
        (["--server-tls", "--server-token-file", "/nowhere", "--port", "0"], "No such file"),
        (["--server-metadata", "x-microturn-tenant"], "is not NAME=VALUE"),
        (["--server-metadata", "x-session-id=4711", "--port", "0"], "'x-session-id' is gRPC's or the client's own"),
        (["--served-model-name", "gpt-4o", "--served-model-name", ""], "a model's name is not empty"),
    ],
)
def test_settings_that_are_wrong(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    told = capsys.readouterr().err
    assert told.startswith("microturn gateway: error: ")
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(("token", "said"), [("", "is empty"), ("short", "16 characters")])
def test_a_token_that_is_none(tmp_path: Path, token: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(token)
    assert main(["--token-file", str(tmp_path / "token")]) == 1
    assert said in capsys.readouterr().err


def test_two_tokens_for_the_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MICROTURN_TOKEN", "another")
    assert main(["--server-tls", "--server-token-file", "/nowhere"]) == 1
    assert "leave one out" in capsys.readouterr().err


def test_a_key_for_client_secrets_that_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("thirty-one characters and a bit"[:31])
    assert main(["--secret-key-file", str(tmp_path / "key")]) == 1
    assert "32 characters" in capsys.readouterr().err


def test_options_that_are_given_again() -> None:
    parser = argparse.ArgumentParser()
    add_gateway_arguments(parser)
    names = ["--served-model-name", "gpt-4o", "--served-model-name", "org/model"]
    settings = settings_from(parser.parse_args([*names, "--allow-origin", "https://app.example"]))
    assert settings.served_model_names == ("gpt-4o", "org/model")
    assert settings.allowed_origins == ("https://app.example",)


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 1
    assert "cannot listen on 127.0.0.1:" in capsys.readouterr().err


def test_the_client_does_not_import_the_gateway() -> None:
    program = "import sys, microturn_client; print({'starlette', 'uvicorn', 'microturn_gateway'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "set()\n"
