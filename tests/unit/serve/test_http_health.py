from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest

from microturn.serve.errors import ServeError
from microturn.serve.health import Health
from microturn.serve.http_health import HttpHealth


class Told:
    """What the server says of itself."""

    health = Health.DOWN


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def balancer(told: Told) -> Iterator[http.client.HTTPConnection]:
    """The connection of one that asks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with HttpHealth("127.0.0.1", port, lambda: told.health):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        yield connection
        connection.close()


def ask(balancer: http.client.HTTPConnection) -> tuple[int, str | None]:
    balancer.request("GET", "/")
    answer = balancer.getresponse()
    assert answer.read()
    return answer.status, answer.getheader("x-envoy-degraded")


def test_a_full_server_is_neither_well_nor_ill(told, balancer):
    assert ask(balancer) == (503, None)
    told.health = Health.OPEN
    assert ask(balancer) == (200, None)
    told.health = Health.FULL
    assert ask(balancer) == (200, "true")


def test_one_connection_asks_again_and_again(balancer):
    ask(balancer)
    connected = balancer.sock
    ask(balancer)
    assert balancer.sock is connected is not None


def test_a_balancer_that_stays_connected_holds_nothing_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with HttpHealth("127.0.0.1", port, lambda: Health.OPEN):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        assert ask(connection) == (200, None)
    connection.close()


def test_what_is_no_get_is_refused(balancer):
    balancer.request("POST", "/", body="x")
    assert balancer.getresponse().status == 501


def test_a_taken_port_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServeError, match="--http-health-port"):
        HttpHealth("127.0.0.1", taken.getsockname()[1], lambda: Health.OPEN)
