"""Checks before the start whether the ports are free.

Triton checks them only after it has loaded the model, which may take minutes.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping

from microturn.serve.errors import ServeError


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Binds and releases every port.

    Args:
        host: the address to listen on.
        ports: port by the option that sets it.

    Raises:
        ServeError: two options name one port, a port is in use, or the address is not this machine's.
    """
    options_of: dict[int, str] = {}
    for option, port in ports.items():
        if port in options_of:
            raise ServeError(f"{options_of[port]} and {option} are both {port}: give them different ports")
        options_of[port] = option
        _check_port(host, port, option)


def _check_port(host: str, port: int, option: str) -> None:
    address = _address_of(host, port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As Triton does: a port whose connections are in TIME_WAIT is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServeError(
                    f"port {port} is in use: stop what listens there, or choose another port with {option}"
                ) from error
            raise ServeError(f"cannot listen on {host}:{port} ({option}): {error.strerror}") from error


def is_loopback(host: str) -> bool:
    """Whether a host is reachable from this machine only.

    Raises:
        ServeError: it is not an IPv4 address or a name of one.
    """
    return ipaddress.ip_address(_address_of(host, 0)[0]).is_loopback


def _address_of(host: str, port: int) -> tuple[str, int]:
    try:
        # Triton's endpoints do not agree on how to write an IPv6 address.
        found = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except socket.gaierror as error:
        raise ServeError(f"--host {host} is not an IPv4 address or a name of one: {error.strerror}") from error
    return str(found[0]), int(found[1])


def local_endpoint(host: str, port: int) -> str:
    """``host:port`` to connect to from this machine: loopback where the host is all interfaces."""
    return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
