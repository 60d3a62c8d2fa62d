"""Where the server is, and what every call of it carries: by arguments, and by the environment where they do not say.

| variable | stands for |
| --- | --- |
| `MICROTURN_ADDRESS` | `address` |
| `MICROTURN_TOKEN` | `token` |
| `MICROTURN_CA_FILE` | `credentials` of TLS, with the authorities of this PEM file |
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from microturn_client._errors import InvalidArgument
from microturn_client._wire import SESSION_METADATA, Metadata

if TYPE_CHECKING:
    import grpc

DEFAULT_ADDRESS = "localhost:8001"

# What is set for every channel, unless its user sets it otherwise.
_CHANNEL_OPTIONS: Mapping[str, int | str] = {
    # A first prompt can be far above the 4 MiB that gRPC allows by itself; the server has limits of its own.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # gRPC waits up to two minutes between attempts; a server that restarts is back in seconds.
    "grpc.max_reconnect_backoff_ms": 1000,
    # With pings, what is written to a connection that is dead is waited for 20 s, and without for a quarter of an hour.
    # More than one in five minutes many servers do not allow.
    "grpc.keepalive_time_ms": 330_000,
}

_METADATA_NAME = re.compile(r"[0-9a-z_.-]+")
_METADATA_TEXT = re.compile(r"[ -~]*")


@dataclass(frozen=True)
class Endpoint:
    """One server, as a client is told of it.

    Attributes:
        address: ``host:port``, or what else gRPC takes as a target.
        credentials: of the channel; None is plain text.
        metadata: of every call.
        channel_options: gRPC's.
    """

    address: str
    credentials: grpc.ChannelCredentials | None
    metadata: Metadata
    channel_options: tuple[tuple[str, int | str], ...]


def endpoint(
    address: str | None = None,
    *,
    token: str | None = None,
    credentials: grpc.ChannelCredentials | None = None,
    metadata: Mapping[str, str | bytes] | None = None,
    channel_options: Mapping[str, int | str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Endpoint:
    """What the arguments say, and the environment where they are None. A variable that is empty says nothing.

    Raises:
        InvalidArgument: metadata that gRPC cannot carry or that is the client's own; a token that would leave this
            machine in plain text; a file of authorities that cannot be read.
    """
    address = address or environment.get("MICROTURN_ADDRESS") or DEFAULT_ADDRESS
    if credentials is None and (file := environment.get("MICROTURN_CA_FILE")):
        credentials = _tls_with(file)
    carried = _checked(metadata or {})
    if "authorization" not in carried:
        token = token or environment.get("MICROTURN_TOKEN")
    elif token:
        raise InvalidArgument("both token= and the metadata 'authorization' are given: leave one out")
    if token and "authorization" not in carried:
        if credentials is None and not _is_on_this_machine(address):
            raise InvalidArgument(f"a token is not sent to {address} in plain text: give credentials= of TLS")
        carried |= _checked({"authorization": f"Bearer {token}"})
    options = {**_CHANNEL_OPTIONS, **(channel_options or {})}
    return Endpoint(address, credentials, tuple(carried.items()), tuple(options.items()))


def _tls_with(file: str) -> grpc.ChannelCredentials:
    import grpc

    try:
        return grpc.ssl_channel_credentials(Path(file).read_bytes())
    except OSError as error:
        raise InvalidArgument(f"MICROTURN_CA_FILE cannot be read: {error}") from error


def _checked(metadata: Mapping[str, str | bytes]) -> dict[str, str | bytes]:
    checked = {name.lower(): value for name, value in metadata.items()}
    for name, value in checked.items():
        if not _METADATA_NAME.fullmatch(name) or name.startswith("grpc-") or name in SESSION_METADATA:
            raise InvalidArgument(f"the metadata '{name}' is gRPC's or the client's own, or has no form on the wire")
        if name.endswith("-bin"):
            can_be_sent = isinstance(value, bytes)
        else:
            can_be_sent = isinstance(value, str) and _METADATA_TEXT.fullmatch(value) is not None
        if not can_be_sent:  # and is not shown: it may be a secret
            raise InvalidArgument(
                f"the metadata '{name}' is printable ASCII text, or bytes where its name ends in -bin"
            )
    return checked


def _is_on_this_machine(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
