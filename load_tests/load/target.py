"""The server that people talk to: an address as Locust's users write it, TLS, and a token."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import grpc

if TYPE_CHECKING:  # Locust replaces threads and sockets as it is imported
    from locust.argument_parser import LocustArgumentParser

_PLAIN, _TLS = "http", "https"
_PORTS = {_PLAIN: 80, _TLS: 443}


@dataclass(frozen=True)
class Target:
    """Where a server is, and what it takes to come in.

    Attributes:
        address: ``host:port``.
        credentials: of TLS; None is plain text.
        token: bearer token; None for none.
        tls_name: the name in its certificate, where that is not the address's.
    """

    address: str
    credentials: grpc.ChannelCredentials | None
    token: str | None
    tls_name: str | None

    @property
    def channel_options(self) -> dict[str, int | str]:
        """Of a channel to it."""
        return {"grpc.ssl_target_name_override": self.tls_name} if self.tls_name else {}

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """Of a call that the client library does not make."""
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    def channel(self, options: tuple[tuple[str, int | str], ...]) -> grpc.Channel:
        """A channel of one's own."""
        options = (*options, *self.channel_options.items())
        if self.credentials is None:
            return grpc.insecure_channel(self.address, options=options)
        return grpc.secure_channel(self.address, self.credentials, options=options)


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
    authorities = Path(options.tls_ca).read_bytes() if options.tls_ca else None
    return Target(
        address,
        grpc.ssl_channel_credentials(authorities) if scheme == _TLS else None,
        Path(options.token_file).read_text().strip() if options.token_file else None,
        options.tls_name or None,
    )


def _parts_of(host: str, *, has_ca: bool) -> tuple[str, str]:
    if "://" not in host:
        return (_TLS if has_ca else _PLAIN), host
    parts = urlsplit(host)
    if parts.scheme not in _PORTS or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"--host is HOST:PORT, http://HOST:PORT or https://HOST:PORT, not '{host}'")
    named = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts.scheme, f"{named}:{parts.port or _PORTS[parts.scheme]}"
