"""Where other servers hand their sessions over: HTTP on a port of its own.

| request | body | answer |
| --- | --- | --- |
| `GET /load` | | how much is here: see `peers.Peer` |
| `POST /find` | `{"id": …, "session_key": …, "tenant": …}` | `{"epoch": …, "route": …}`; null where it is not here |
| `POST /give` | the same, and the asker's `port` | `{}`: the session is there now |
| `PUT /kv/NAME` | KV of a session that goes on there: a header with a `KVPart`, the pages | `{}` |
| `PUT /sessions/NAME` | a snapshot, without what was sent as `/kv/NAME` | `{"route": …}`: the session lives here |
| `POST /drop` | `{"id": …}` and the `Mark` that was sent | `{"goes_on": …, "route": …}`: it is here if it had a turn |

A server that has as many sessions as the header `x-enough-sessions` says, with those on their way, takes no more.
An error is `{"error": {"code": …, "message": …}}`. Each request brings the key that all servers share, if there is one.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any

from microturn.admin.hand_over import send_to_peer
from microturn.admin.peer_address import Address
from microturn.admin.peer_connection import ENOUGH, EPOCH_BEFORE
from microturn.admin.peers import Peers
from microturn.admin.received import Receiver
from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.engine.moving import Mark
from microturn.errors import InternalError, InvalidArgument, MicroturnError, NotFound, PermissionDenied
from microturn.sessions.turn import SessionId

log = logging.getLogger(__name__)

_SILENCE_S = 30.0
# How long it takes at most to stop.
_POLL_S = 0.1
_MAX_JSON_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20


def route_to(edge_address: str) -> str | None:
    """What `x-session-route` says of a server: Envoy's word for the address by which it reaches it.

    Args:
        edge_address: ``host:port``; empty where sessions are reached otherwise.
    """
    return base64.b64encode(edge_address.encode()).decode() if edge_address else None


class PeerServer:
    """Takes sessions, with a thread per connection.

    Attributes:
        receiver: what they come to.

    Args:
        address: host and port to listen on.
        key: what each request must bring; empty asks for none.
        instance: names this process among the others.
        route: see `route_to`.
        engine: gets the sessions.
        peers: the other servers.

    Raises:
        InvalidArgument: the port is in use.
    """

    def __init__(
        self, address: Address, key: str, instance: str, route: str | None, engine: Engine, peers: Peers
    ) -> None:
        try:
            self._server = _Server(address, _Handler)
        except OSError as error:
            raise InvalidArgument(f"peer_address: cannot listen on {address[0]}:{address[1]}: {error}") from error
        self._server.key, self._server.instance, self._server.route = key, instance, route
        self._server.begun_s = time.monotonic()
        self.receiver = Receiver(engine)
        self._server.engine, self._server.peers, self._server.receiver = engine, peers, self.receiver
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="microturn-peers")
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        """Takes no more sessions."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # many may look for their sessions at once
    key: str
    instance: str
    route: str | None
    begun_s: float
    engine: Engine
    peers: Peers
    receiver: Receiver

    def service_actions(self) -> None:
        """Called every `_POLL_S`: what has been sent here in vain goes, also where nothing else comes."""
        self.receiver.drop_old()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a connection of %s broke", client_address[0], exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE_S
    # A body behind its headers would wait 40 ms for their acknowledgement, while a session is held.
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        told: Mapping[str, Any]
        body = _Body(self.rfile, 0)
        try:
            self._check_key()
            body.num_left = self._num_bytes()
            told = self._told(body)
            status = HTTPStatus.OK
        except (PermissionDenied, _BadRequest) as error:
            self.close_connection = True  # what else it sends is not read
            told, status = {"error": {"code": error.code, "message": error.args[0]}}, HTTPStatus.FORBIDDEN
        except MicroturnError as error:
            told, status = {"error": {"code": error.code, "message": error.args[0]}}, HTTPStatus.CONFLICT
        except OSError:
            self.close_connection = True  # the other server has gone
            return
        except Exception as error:
            log.exception("a request of another server failed")
            told = {"error": {"code": InternalError.code, "message": str(error)}}
            status = HTTPStatus.INTERNAL_SERVER_ERROR
        if not body.skip():
            self.close_connection = True
            return
        self._send(status, told)

    def _num_bytes(self) -> int:
        if self.headers.get("transfer-encoding"):
            raise _BadRequest("a body has a content-length here, and no transfer-encoding")
        length = self.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            raise _BadRequest("content-length is a number")
        return int(length)

    def _check_key(self) -> None:
        said = self.headers.get("authorization", "").encode()
        if self.server.key and not hmac.compare_digest(said, f"Bearer {self.server.key}".encode()):
            raise PermissionDenied("another server asks with another key: all read the same peer_key_file")

    def _told(self, body: _Body) -> Mapping[str, Any]:
        server = self.server
        place, _, name = self.path.removeprefix("/").partition("/")
        match self.command, place:
            case "GET", "load":
                load = server.engine.call(lambda sessions: sessions.load)
                model = server.engine.environment.model_fingerprint
                age_s = time.monotonic() - server.begun_s
                num_sessions = load.num_sessions + server.receiver.num_coming
                of_process = {"instance": server.instance, "model": model, "age_s": age_s}
                return {**asdict(load), "num_sessions": num_sessions, **of_process}
            case "POST", "find":
                return {"epoch": self._epoch_of(_question_in(body)), "route": server.route}
            case "POST", "give":
                self._give(_question_in(body))
                return {}
            case "POST", "drop":
                question = _question_in(body)
                goes_on = server.engine.call(partial(Maintenance.drop, session_id=question.id, mark=question.mark))
                return {"goes_on": goes_on, "route": server.route}
            case "PUT", "kv":
                server.receiver.take_ahead(name, body, self._enough())
                return {}
            case "PUT", "sessions":
                epoch_before = _number(self.headers.get(EPOCH_BEFORE), EPOCH_BEFORE)
                server.receiver.take(name, body, body.num_left, epoch_before, self._enough())
                return {"route": server.route}
            case _:
                raise InvalidArgument(f"there is no {self.command} {self.path} here")

    def _enough(self) -> float:
        said = self.headers.get(ENOUGH)
        return math.inf if said is None else _number(said, ENOUGH)

    def _epoch_of(self, question: _Question) -> int | None:
        return self.server.engine.call(
            lambda sessions: sessions.epoch_of(question.id, question.session_key, question.tenant)
        )

    def _give(self, question: _Question) -> None:
        if self._epoch_of(question) is None:
            raise NotFound(f"no session '{question.id}' is here")
        with self.server.peers.connect((self.client_address[0], question.port)) as connection:
            if send_to_peer(self.server.engine, question.id, connection) is None:
                raise NotFound(f"session '{question.id}' has ended")

    def _send(self, status: HTTPStatus, told: Mapping[str, Any]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: it is asked every second."""


class _Body:
    """The body of a request as a stream that ends with it.

    Attributes:
        num_left: bytes that have not been read.
    """

    def __init__(self, stream: BufferedIOBase, num_bytes: int) -> None:
        self.num_left = num_bytes
        self._stream = stream

    def read(self, num_bytes: int) -> bytes:
        piece = self._stream.read(min(num_bytes, self.num_left))
        self.num_left -= len(piece)
        return piece

    def readinto(self, buffer: memoryview) -> int:
        num_read = self._stream.readinto(buffer[: self.num_left])
        self.num_left -= num_read
        return num_read

    def skip(self) -> bool:
        """Reads what is left: otherwise the answer would be lost. False where the other has gone."""
        try:
            while self.num_left and self.read(_PIECE_BYTES):
                pass
        except OSError:
            return False
        return not self.num_left


class _BadRequest(InvalidArgument):
    """A request whose end cannot be told."""


@dataclass(frozen=True)
class _Question:
    """What is asked of a session."""

    id: SessionId
    session_key: str | None
    tenant: str | None
    port: int
    mark: Mark


def _question_in(body: _Body) -> _Question:
    try:
        said = json.loads(body.read(_MAX_JSON_BYTES))
    except ValueError:
        said = None
    if not isinstance(said, dict) or not isinstance(said.get("id"), str | int):
        raise InvalidArgument('a question is {"id": the session}')
    key, tenant = said.get("session_key"), said.get("tenant")
    if not isinstance(key, str | None) or not isinstance(tenant, str | None):
        raise InvalidArgument("session_key and tenant are texts")
    port, *mark = (_number(said.get(name, 0), name) for name in ("port", *Mark._fields))
    return _Question(said["id"], key, tenant, port, Mark(*mark))


def _number(said: Any, name: str) -> int:
    if isinstance(said, bool) or not str(said).isascii() or not str(said).isdigit():
        raise InvalidArgument(f"{name} is a number")
    return int(said)
