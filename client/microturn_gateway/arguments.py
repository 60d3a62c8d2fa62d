"""The options of `microturn gateway`. Imports nothing heavy: `microturn --help` reads them too."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

from microturn_gateway.server_access import ServerAccess
from microturn_gateway.settings import GatewaySettings

TOKEN_VARIABLE = "MICROTURN_GATEWAY_TOKEN"
_SERVER_TOKEN_VARIABLE = "MICROTURN_TOKEN"  # that the client library reads
_DEFAULTS = GatewaySettings()
_NAMES = {field.name for field in fields(GatewaySettings)}


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a parser."""
    add = parser.add_argument
    add("--server", default=_DEFAULTS.server, metavar="HOST:PORT", help="gRPC of the server (%(default)s)")
    add("--server-tls", action="store_true", help="speak TLS to it, with gRPC's own list of authorities")
    add("--server-tls-ca", type=Path, metavar="FILE", help="the authorities of its certificate, PEM; implies TLS")
    add("--server-tls-cert", type=Path, metavar="FILE", help="client certificate, PEM, where it asks for one")
    add("--server-tls-key", type=Path, metavar="FILE", help="key of that, PEM")
    add("--server-tls-name", metavar="NAME", help="in its certificate, where that has not the name of its address")
    add("--server-token-file", type=Path, metavar="FILE", help="bearer token for it; read again for each stream")
    add("--server-metadata", action="append", default=[], metavar="NAME=VALUE", help="header of every call to it")
    add("--host", default=_DEFAULTS.host, help="to listen on (%(default)s)")
    add("--port", type=int, default=_DEFAULTS.port, help="to listen on (%(default)s); 0 takes a free one")
    add("--token-file", type=Path, metavar="FILE", help=f"holds the token of clients; else ${TOKEN_VARIABLE}")
    add("--metrics-token-file", type=Path, metavar="FILE", help="holds one that opens /metrics and nothing else")
    add("--secret-key-file", type=Path, metavar="FILE", help="signs client secrets; else derived of the token")
    add("--allow-origin", action="append", default=[], metavar="URL", help="pages that may connect besides ours")
    add("--served-model-name", action="append", default=[], metavar="NAME", help="the model's, besides the server's")
    add("--beat-ms", type=float, default=_DEFAULTS.beat_ms, help="between micro-turns (%(default)g)")
    add("--max-sessions", type=int, default=_DEFAULTS.max_sessions, help="at once (%(default)s)")
    add("--idle-timeout-s", type=float, default=_DEFAULTS.idle_timeout_s, help="silence that ends one (%(default)g)")
    add("--max-answer-tokens", type=int, default=_DEFAULTS.max_answer_tokens, help="unless told (%(default)s)")


def settings_from(arguments: argparse.Namespace) -> GatewaySettings:
    """The settings that the options say.

    Raises:
        ValueError: they are not valid.
        OSError: a file cannot be read.
    """
    return GatewaySettings(
        **{name: value for name, value in vars(arguments).items() if name in _NAMES},
        server_access=_server_access(arguments),
        token=_text_of(arguments.token_file) or os.environ.get(TOKEN_VARIABLE, "").strip() or None,
        metrics_token=_text_of(arguments.metrics_token_file),
        secret_key=_text_of(arguments.secret_key_file),
        allowed_origins=tuple(arguments.allow_origin),
        served_model_names=tuple(arguments.served_model_name),
    )


def _server_access(arguments: argparse.Namespace) -> ServerAccess:
    """How the server is reached."""
    if arguments.server_token_file is not None and os.environ.get(_SERVER_TOKEN_VARIABLE):
        raise ValueError(f"both --server-token-file and ${_SERVER_TOKEN_VARIABLE} are given: leave one out")
    metadata = dict(_named_value(text) for text in arguments.server_metadata)
    return ServerAccess(
        uses_tls=arguments.server_tls,
        tls_ca=arguments.server_tls_ca,
        tls_cert=arguments.server_tls_cert,
        tls_key=arguments.server_tls_key,
        tls_name=arguments.server_tls_name,
        token_file=arguments.server_token_file,
        metadata=metadata,
    )


def _named_value(text: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not name or not is_given:
        raise ValueError(f"'{text}' is not NAME=VALUE (--server-metadata)")
    return name, value


def _text_of(file: Path | None) -> str | None:
    """What a file holds."""
    if file is None:
        return None
    text = file.read_text().strip()
    if not text:
        raise ValueError(f"'{file}' is empty")
    return text
