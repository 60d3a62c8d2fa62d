"""Asks, before anything is started, whether the ports are free.

Triton finds out only after it has loaded the model, which may take minutes.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from microturn.serve.errors import ServeError


def check_ports(host: str, ports: Mapping[str, int]) -> None:
    """Binds every port once and lets it go.

    Args:
        host: the address to listen on.
        ports: port by the option that sets it.

    Raises:
        ServeError: two options name one port, a port is in use, or the address is not ours.
    """
    options_of: dict[int, str] = {}
    for option, port in ports.items():
        if port in options_of:
            raise ServeError(f"{options_of[port]} and {option} are both {port}: give them different ports")
        options_of[port] = option
        _check_port(host, port, option)


def _check_port(host: str, port: int, option: str) -> None:
    try:
        # Triton's endpoints do not agree on how to write an IPv6 address.
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ServeError(f"--host {host} is not an IPv4 address or a name of one: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as listener:
        # As Triton does: a port whose last connections are only fading out is free.
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


def local_endpoint(host: str, port: int) -> str:
    """Where this machine reaches what listens on a host: by loopback, when that is all interfaces."""
    return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
