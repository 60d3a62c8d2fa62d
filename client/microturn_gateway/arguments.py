"""The options of `microturn gateway`. Imports nothing heavy: `microturn --help` reads them too."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

from microturn_gateway.settings import GatewaySettings

TOKEN_VARIABLE = "MICROTURN_GATEWAY_TOKEN"
_DEFAULTS = GatewaySettings()
_NAMES = {field.name for field in fields(GatewaySettings)}


def add_gateway_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a parser."""
    add = parser.add_argument
    add("--server", default=_DEFAULTS.server, metavar="HOST:PORT", help="gRPC of the server (%(default)s)")
    add("--host", default=_DEFAULTS.host, help="to listen on (%(default)s)")
    add("--port", type=int, default=_DEFAULTS.port, help="to listen on (%(default)s); 0 takes a free one")
    add("--token-file", type=Path, metavar="FILE", help=f"holds the token of clients; else ${TOKEN_VARIABLE}")
    add("--secret-key-file", type=Path, metavar="FILE", help="signs client secrets, one in all replicas; else the token")
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
        token=_text_of(arguments.token_file) or os.environ.get(TOKEN_VARIABLE, "").strip() or None,
        secret_key=_text_of(arguments.secret_key_file),
        allowed_origins=tuple(arguments.allow_origin),
        served_model_names=tuple(arguments.served_model_name),
    )


def _text_of(file: Path | None) -> str | None:
    """What a file holds."""
    if file is None:
        return None
    text = file.read_text().strip()
    if not text:
        raise ValueError(f"'{file}' is empty")
    return text
