"""How the gateway reaches its server: plain text on an internal network, or TLS and a token through an edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc


@dataclass(frozen=True)
class ServerAccess:
    """What it takes to be let in.

    Attributes:
        uses_tls: with gRPC's own list of authorities unless `tls_ca` is another.
        tls_ca: the authorities that may vouch for the server, a file of PEM; it implies TLS.
        tls_cert: certificate of the gateway, for a server that asks for one; a file of PEM.
        tls_key: of that certificate.
        tls_name: in the server's certificate, where it is not that of its address.
        token_file: holds a bearer token. It is read again for each stream, so that it can be renewed.
        metadata: of every call.

    Raises:
        ValueError: a part is missing.
    """

    uses_tls: bool = False
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_name: str | None = None
    token_file: Path | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("a client certificate has a key: give --server-tls-cert and --server-tls-key")
        needs_tls = (self.tls_cert, self.tls_name, self.token_file)
        if not self.has_tls and any(needs_tls):
            raise ValueError("a token, a certificate and its name are for TLS: give --server-tls or --server-tls-ca")

    @property
    def has_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.uses_tls or self.tls_ca is not None

    def client_options(self) -> dict[str, Any]:
        """What `AsyncClient` takes besides the address.

        Raises:
            OSError: a file cannot be read.
        """
        options: dict[str, Any] = {}
        if self.metadata:
            options["metadata"] = self.metadata
        if self.has_tls:
            options["credentials"] = self._credentials()
        if self.tls_name is not None:
            options["channel_options"] = {"grpc.ssl_target_name_override": self.tls_name}
        return options

    def _credentials(self) -> grpc.ChannelCredentials:
        import grpc

        authorities, key, certificate = (
            None if file is None else file.read_bytes() for file in (self.tls_ca, self.tls_key, self.tls_cert)
        )
        tls = grpc.ssl_channel_credentials(authorities, key, certificate)
        if self.token_file is None:
            return tls
        self.token_file.read_bytes()  # what cannot be read is said when the gateway starts
        return grpc.composite_channel_credentials(tls, grpc.metadata_call_credentials(_TokenOf(self.token_file)))


class _TokenOf:
    """The token in a file, as gRPC asks for it whenever a stream opens (`grpc.AuthMetadataPlugin`)."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __call__(self, _context: object, callback: Any) -> None:
        try:
            token = self._file.read_text().strip()
        except OSError as error:
            callback((), error)
        else:
            callback((("authorization", f"Bearer {token}"),), None)
