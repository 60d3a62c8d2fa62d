"""`microturn health`, which container engines run."""

from __future__ import annotations

import socket

from microturn.cli import main
from microturn.serve.health import Health, HealthService


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_the_exit_code_says_whether_the_model_answers(capfd):
    address = _free_address()
    with HealthService(address) as health:
        assert main(["health", address]) == 1
        health.set_health(Health.OPEN)
        assert main(["health", address]) == 0
        health.drain()
        assert main(["health", address]) == 1
        # Read while the server runs: gRPC may log its end, for channels are closed in the background.
        said = capfd.readouterr().err.splitlines()
    assert said == [f"microturn: {address}: {answer}" for answer in ("NOT_SERVING", "SERVING", "NOT_SERVING")]


def test_a_service_may_be_asked_for():
    address = _free_address()
    with HealthService(address) as health:
        health.set_health(Health.FULL)
        assert main(["health", address]) == 0
        assert main(["health", address, "--service", "new-sessions"]) == 1


def test_nobody_there_is_not_healthy(capfd):
    assert main(["health", _free_address(), "--timeout-s", "1"]) == 1
    assert "refused" in capfd.readouterr().err
