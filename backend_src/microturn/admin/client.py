"""The client of the admin socket. Imports nothing heavy, so that commands start quickly."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from microturn.admin.address import socket_address
from microturn.errors import Unavailable, error_of


def ask(socket_path: Path, op: str, patience_s: float, **arguments: Any) -> Any:
    """Calls an operation.

    Args:
        socket_path: of the server's admin socket.
        op: the operation; see `operations`.
        patience_s: timeout of the answer.
        arguments: of the operation.

    Returns:
        Its result.

    Raises:
        MicroturnError: the server's error; Unavailable if it does not answer.
    """
    try:
        with socket_address(socket_path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(patience_s)
            connection.connect(address)
            connection.sendall(json.dumps({"op": op, **arguments}).encode() + b"\n")
            with connection.makefile("rb") as replies:
                line = replies.readline()
    except OSError as error:
        raise Unavailable(f"no answer from a server on {socket_path}: {error.strerror or error}") from error
    if not line.endswith(b"\n"):
        raise Unavailable(f"the server on {socket_path} went away before it had answered")
    reply = json.loads(line)
    if "error" in reply:
        raise error_of(reply["error"]["code"], reply["error"]["message"])
    return reply["result"]
