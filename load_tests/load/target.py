"""The server that people talk to: an address as Locust's users write it, TLS, and a token."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc

from microturn_gateway.server_access import ServerAccess

if TYPE_CHECKING:  # Locust replaces threads and sockets as it is imported
    from locust.argument_parser import LocustArgumentParser

_PLAIN, _TLS = "http", "https"
_PORTS = {_PLAIN: 80, _TLS: 443}


@dataclass(frozen=True)
class Target:
    """Where a server is, and what it takes to come in.

    Attributes:
        address: ``host:port``.
        options: what `Client` takes besides.
    """

    address: str
    options: dict[str, Any]

    def channel(self, options: Mapping[str, int | str]) -> grpc.Channel:
        """A channel of one's own."""
        own = [*options.items(), *self.options.get("channel_options", {}).items()]
        if "credentials" not in self.options:
            return grpc.insecure_channel(self.address, options=own)
        return grpc.secure_channel(self.address, self.options["credentials"], options=own)


def add_target_options(parser: LocustArgumentParser) -> None:
    """What Locust's `--host` does not say."""
    ours = parser.add_argument_group("Microturn's edge", "for --host https://HOST:PORT; see docs/deploy.md")
    ours.add_argument("--tls-ca", default="", help="authorities of its certificate, PEM; else gRPC's own list")
    ours.add_argument("--tls-name", default="", help="in its certificate, where that has not the name of its address")
    ours.add_argument("--token-file", default="", help="holds the bearer token that people come with")


def target_of(host: str, options: argparse.Namespace) -> Target:
    """The target that Locust's options describe.

    Args:
        host: HOST:PORT or http://HOST:PORT is plain text, https://HOST:PORT is TLS.
        options: of the command line.

    Raises:
        ValueError: there is no such form of an address, or a token would be sent in plain text.
        OSError: a file cannot be read.
    """
    scheme, address = _parts_of(host, has_ca=bool(options.tls_ca))
    if options.token_file and scheme != _TLS:
        raise ValueError(f"a token is not sent to {address} in plain text: --host https://…")
    access = ServerAccess(
        uses_tls=scheme == _TLS,
        tls_ca=Path(options.tls_ca) if options.tls_ca else None,
        tls_name=options.tls_name or None,
        token_file=Path(options.token_file) if options.token_file else None,
    )
    return Target(address, access.client_options())


def _parts_of(host: str, *, has_ca: bool) -> tuple[str, str]:
    if "://" not in host:
        return (_TLS if has_ca else _PLAIN), host
    parts = urlsplit(host)
    if parts.scheme not in _PORTS or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"--host is HOST:PORT, http://HOST:PORT or https://HOST:PORT, not '{host}'")
    named = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, f"{named}:{parts.port or _PORTS[parts.scheme]}"
