from __future__ import annotations

import socket

import pytest

from microturn.serve.errors import ServeError
from microturn.serve.ports import check_ports, is_loopback, local_endpoint


def test_a_port_that_something_listens_on_is_named_with_its_option():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=rf"port {port} is in use: .* --http-port"):
            check_ports("127.0.0.1", {"--http-port": port})
    check_ports("127.0.0.1", {"--http-port": port})


def test_a_port_whose_connections_fade_out_is_free():
    """Right after a stop the port of the server before has connections in TIME_WAIT."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            accepted.close()
    check_ports("127.0.0.1", {"--grpc-port": port})


def test_two_options_may_not_name_one_port():
    with pytest.raises(ServeError, match="--grpc-port and --health-port are both 1234"):
        check_ports("127.0.0.1", {"--grpc-port": 1234, "--health-port": 1234})


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ServeError, match=r"cannot listen on 192\.0\.2\.1:1234"):
        check_ports("192.0.2.1", {"--grpc-port": 1234})


@pytest.mark.parametrize("host", ["host.invalid", "::1"])
def test_what_is_no_address_is_refused(host):
    with pytest.raises(ServeError, match=f"--host {host} is not an IPv4 address"):
        check_ports(host, {"--grpc-port": 1234})


def test_this_machine_reaches_all_interfaces_by_loopback():
    assert local_endpoint("0.0.0.0", 80) == "127.0.0.1:80"
    assert local_endpoint("10.0.0.1", 80) == "10.0.0.1:80"


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.1", True), ("127.1.2.3", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_which_hosts_only_this_machine_reaches(host, expected):
    assert is_loopback(host) == expected
