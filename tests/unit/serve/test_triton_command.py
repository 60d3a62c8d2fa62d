from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from microturn.serve import triton_command as module
from microturn.serve.options import add_serve_arguments, read_options
from microturn.serve.triton_command import triton_command


def command(*arguments: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return triton_command(
        Path("tritonserver"),
        read_options(parser.parse_args(arguments)),
        model_repository=Path("models"),
        backends=Path("backends"),
        shm_prefix="run-",
    )


def test_everything_listens_where_it_was_told():
    built = command("--host=10.0.0.1", "--grpc-port=1", "--http-port=2", "--metrics-port=3")
    assert built[0] == "tritonserver"
    assert {"--grpc-address=10.0.0.1", "--http-address=10.0.0.1", "--metrics-address=10.0.0.1"} < set(built)
    assert {"--grpc-port=1", "--http-port=2", "--metrics-port=3"} < set(built)
    assert "--backend-config=python,shm-region-prefix-name=run-" in built


def test_the_users_arguments_come_last_and_so_win():
    assert command("--triton-arg=--log-info=true", "--triton-arg=--log-verbose=1")[-2:] == [
        "--log-info=true",
        "--log-verbose=1",
    ]


def test_the_whole_log_is_wanted_only_where_it_has_a_place():
    assert "--log-info=false" in command()
    assert "--log-info=true" in command("--log-dir=logs")


def test_triton_does_not_wait_longer_than_the_grace_time():
    assert "--exit-timeout-secs=3" in command("--grace-s=2.5")


def test_the_header_of_a_tenant_is_forwarded_where_tenants_are_told_apart():
    forwarded = "--grpc-header-forward-pattern=^x-microturn-tenant$"
    assert forwarded in command("--set", "max_sessions_per_tenant=2")
    assert forwarded not in command()
    assert forwarded not in command("--set", "max_sessions_per_tenant=0")


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_gpu_is_measured_where_there_is_one(has_gpu, tmp_path, monkeypatch):
    device = tmp_path / "nvidiactl"
    if has_gpu:
        device.touch()
    monkeypatch.setattr(module, "_NVIDIA_DRIVER", device)
    assert f"--allow-gpu-metrics={'true' if has_gpu else 'false'}" in command()


def test_http_is_closed_unless_it_has_a_port():
    """Nothing here uses it, and it was open all the same."""
    assert "--allow-http=false" in command()
    assert [argument for argument in command() if argument.startswith("--http")] == []
    opened = command("--http-port=8000")
    assert "--allow-http=false" not in opened
    assert any(argument.startswith("--http-restricted-api=model-repository,") for argument in opened)


def test_calls_that_change_the_server_ask_for_a_word_that_nobody_knows():
    """Whoever reached the port could load another model, or register shared memory."""
    first, second = (
        [argument for argument in command() if argument.startswith("--grpc-restricted-protocol=")] for _ in range(2)
    )
    assert len(first) == 1
    groups, _, word = first[0].removeprefix("--grpc-restricted-protocol=").partition(":")
    assert set(groups.split(",")) == {"model-repository", "shared-memory", "statistics", "trace", "logging"}
    assert len(word.partition("=")[2]) >= 32
    assert first != second
