"""The admin socket: connections, request lines, replies."""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from microturn.admin.address import socket_address
from microturn.errors import InternalError, InvalidArgument, MicroturnError

log = logging.getLogger(__name__)

Answer = Callable[[Mapping[str, Any]], Any]

_MAX_LINE_BYTES = 1 << 16
_SILENCE_S = 60.0


class AdminSocket:
    """Listens on a Unix socket, with a thread per connection.

    Args:
        path: of the socket; the socket of a dead server is replaced.
        answer: handles a request; called in the connection's thread.

    Raises:
        InvalidArgument: it cannot listen there.
    """

    def __init__(self, path: Path, answer: Answer) -> None:
        self._path = path
        try:
            with socket_address(path) as address:
                _remove_dead(path, address)
                self._server = _Server(address, answer)
        except OSError as error:
            raise InvalidArgument(f"admin_socket: cannot listen on {path}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="microturn-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accepts no more connections; running requests are still answered."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, answer: Answer) -> None:
        self.answer = answer
        super().__init__(address, _Connection)

    def server_bind(self) -> None:
        # Before `bind`: a mode that is set after it would leave the socket open to others for a moment.
        os.fchmod(self.socket.fileno(), 0o600)
        super().server_bind()


class _Connection(socketserver.StreamRequestHandler):
    timeout = _SILENCE_S
    server: _Server

    def handle(self) -> None:
        try:
            while line := self.rfile.readline(_MAX_LINE_BYTES):
                self.wfile.write(json.dumps(self._reply(line)).encode() + b"\n")
                if not line.endswith(b"\n"):
                    self._skip_rest()
        except OSError as error:
            log.info("an admin connection ended: %s", error)

    def _skip_rest(self) -> None:
        """Reads the rest of a line that is too long: unread data would reset the connection and lose the reply."""
        while self.rfile.read(_MAX_LINE_BYTES):
            pass

    def _reply(self, line: bytes) -> dict[str, Any]:
        try:
            return {"result": self.server.answer(_read_request(line))}
        except MicroturnError as error:
            return {"error": {"code": error.code, "message": error.args[0]}}
        except Exception as error:
            log.exception("an admin request failed")
            return {"error": {"code": InternalError.code, "message": str(error)}}


def _read_request(line: bytes) -> Mapping[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        request = None
    if not isinstance(request, dict) or not line.endswith(b"\n"):
        raise InvalidArgument(f"a request is a JSON object on a line of less than {_MAX_LINE_BYTES} bytes")
    return request


def _remove_dead(path: Path, address: str) -> None:
    """Removes a socket without a listener; one with a listener makes `bind` fail."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(address)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
