from __future__ import annotations

import socket
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from microturn.serve.errors import ServeError
from microturn.serve.health import Health, HealthService

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def asked(address: str) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def check(asked: health_pb2_grpc.HealthStub, service: str = "") -> int:
    return asked.Check(health_pb2.HealthCheckRequest(service=service), timeout=5, wait_for_ready=True).status


def test_both_services_say_what_was_set(address, asked):
    with HealthService(address) as health:
        assert check(asked) == check(asked, "streaming_llm") == NOT_SERVING
        health.set_health(Health.OPEN)
        assert check(asked) == check(asked, "streaming_llm") == SERVING
        health.set_health(Health.DOWN)
        assert check(asked) == check(asked, "streaming_llm") == NOT_SERVING


def test_a_full_server_is_healthy_and_says_that_it_opens_no_session(address, asked):
    with HealthService(address) as health:
        assert check(asked, "new-sessions") == NOT_SERVING
        health.set_health(Health.OPEN)
        assert check(asked, "new-sessions") == SERVING
        health.set_health(Health.FULL)
        assert check(asked) == check(asked, "streaming_llm") == SERVING
        assert check(asked, "new-sessions") == NOT_SERVING
        health.set_health(Health.OPEN)
        assert check(asked, "new-sessions") == SERVING
        health.set_health(Health.DOWN)
        assert check(asked, "new-sessions") == NOT_SERVING


def test_an_unknown_service_is_not_found(address, asked):
    with HealthService(address), pytest.raises(grpc.RpcError) as refused:
        check(asked, "other")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_watcher_is_told_of_every_change(address, asked):
    with HealthService(address) as health:
        watch = asked.Watch(health_pb2.HealthCheckRequest(service=""), timeout=5, wait_for_ready=True)
        assert next(watch).status == NOT_SERVING
        health.set_health(Health.OPEN)
        assert next(watch).status == SERVING
        health.drain()
        assert next(watch).status == NOT_SERVING
        watch.cancel()


def test_a_drained_service_stays_so(address, asked):
    with HealthService(address) as health:
        health.set_health(Health.OPEN)
        health.drain()
        health.set_health(Health.DOWN)
        health.set_health(Health.OPEN)
        assert check(asked) == NOT_SERVING


def test_a_taken_port_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServeError, match="--health-port"):
        HealthService(f"127.0.0.1:{taken.getsockname()[1]}")
