"""The other servers of the fleet: which there are, how much is on them, and a session's way to one of them."""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from microturn.errors import MicroturnError, PermissionDenied, Unavailable, error_of
from microturn.offload.copies import KVCopy
from microturn.offload.image_file import header_bytes
from microturn.sessions.table import moved
from microturn.sessions.turn import TurnRequest
from microturn.snapshots.file import sealed
from microturn.snapshots.kv_part import add_to_header
from microturn.snapshots.snapshot import Snapshot

log = logging.getLogger(__name__)

T = TypeVar("T")
Address = tuple[str, int]
Piece = bytes | bytearray | memoryview

# Within so long the edge has found a new server in the DNS, and seen that it is healthy.
SETTLED_S = 5.0

_QUESTION_S = 1.0
_SESSION_S = 30.0
_NUM_ASKED_AT_ONCE = 32


def read_address(text: str) -> Address:
    """Host and port of ``host:port``.

    Raises:
        ValueError: it is not that.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not 0 < int(port) < 1 << 16:
        raise ValueError(f"'{text}' is not host:port")
    return host.strip("[]"), int(port)


@dataclass(frozen=True)
class Peer:
    """Another server, and what it said of itself.

    Attributes:
        address: where it takes sessions.
        num_sessions: that live there, or are about to.
        max_sessions: that may.
        free_bytes: of its pool of KV.
        is_leaving: whether it takes no more sessions.
        instance: names its process.
        model: fingerprint of its model.
        age_s: since when it takes sessions.
    """

    address: Address
    num_sessions: int
    max_sessions: int
    free_bytes: int
    is_leaving: bool
    instance: str
    model: str
    age_s: float

    @property
    def share(self) -> float:
        """How full it is."""
        return self.num_sessions / self.max_sessions


class Peers:
    """Asks the other servers; callable in any thread.

    Args:
        addresses: each ``host:port``; of a name with several addresses each is a server. This one may be among them.
        key: that all servers share; empty where they need none.
        instance: names this process.
        port: where this server takes sessions.
    """

    def __init__(self, addresses: Iterable[Address], key: str, instance: str, port: int) -> None:
        self._addresses = tuple(addresses)
        self._key = key
        self._instance = instance
        self._port = port
        self._threads = ThreadPoolExecutor(_NUM_ASKED_AT_ONCE, "microturn-peers")

    def others(self, model: str) -> list[Peer]:
        """The other servers of a model that answer and take sessions, the emptiest first.

        Those that have just come are left out, unless there are no others: the edge may not know them yet.
        """
        found = self._ask_all(self._load_of)
        others = [peer for peer in found if peer.instance != self._instance and peer.model == model]
        others = sorted((peer for peer in others if not peer.is_leaving), key=lambda peer: peer.share)
        return [peer for peer in others if peer.age_s >= SETTLED_S] or others

    def fetch(self, request: TurnRequest) -> bool:
        """Has a session handed over to this server; returns whether it lived on another one.

        Args:
            request: what its client comes back with; it must be the session's owner.

        Raises:
            Unavailable: it lives on another server and stays there; with the route to it, if there is one.
            PermissionDenied: it is another client's.
        """
        asked: dict[str, Any] = {"id": request.session_id}
        places = self._ask_all(lambda address: (address, self._ask(address, "POST", "/find", asked)))
        place = next((place for place in places if place[1]["lives"]), None)
        if place is None:
            return False
        address, found = place
        options = request.options
        asked |= {"port": self._port, "session_key": options.get("session_key"), "tenant": options.get("tenant")}
        try:
            self._ask(address, "POST", "/give", asked, timeout_s=_SESSION_S)
        except PermissionDenied:
            raise
        except MicroturnError as error:
            log.info("session %s stays where it is: %s", request.session_id, error)
            raise moved(found["route"]) from error
        return True

    @contextmanager
    def connect(self, address: Address) -> Iterator[PeerConnection]:
        """A connection by which one session is handed over."""
        connection = PeerConnection(address, self._key, _SESSION_S)
        try:
            yield connection
        finally:
            connection.close()

    def close(self) -> None:
        """Asks no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load_of(self, address: Address) -> Peer:
        return Peer(address=address, **self._ask(address, "GET", "/load"))

    def _ask(
        self, address: Address, method: str, path: str, question: Any = None, timeout_s: float = _QUESTION_S
    ) -> Any:
        connection = PeerConnection(address, self._key, timeout_s)
        try:
            return connection.ask(method, path, [] if question is None else [json.dumps(question).encode()])
        finally:
            connection.close()

    def _ask_all(self, ask: Callable[[Address], T]) -> list[T]:
        """The answers of those that give one."""

        def ask_one(address: Address) -> T | None:
            try:
                return ask(address)
            except MicroturnError as error:
                log.debug("%s:%d: %s", *address, error)
                return None

        addresses = {found for address in self._addresses for found in _resolve(address)}
        return [answer for answer in self._threads.map(ask_one, sorted(addresses)) if answer is not None]


class PeerConnection:
    """A connection to another server's port for sessions: see `peer_server`.

    Args:
        address: of it.
        key: that all servers share; empty where they need none.
        timeout_s: of each answer.
    """

    def __init__(self, address: Address, key: str, timeout_s: float) -> None:
        self._name = f"{address[0]}:{address[1]}"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = http.client.HTTPConnection(*address, timeout=timeout_s)

    def close(self) -> None:
        self._http.close()

    def send_ahead(self, kv: KVCopy) -> str:
        """Sends KV whose session will follow, and returns the name by which that refers to it.

        Raises:
            MicroturnError: the other server does not take it, or does not answer.
        """
        header: dict[str, Any] = {"__metadata__": {}}
        add_to_header(header, kv, 0, is_checked=False)
        transfer = secrets.token_hex(8)
        self.ask("PUT", f"/kv/{transfer}", [header_bytes(header), *kv.pages.contents()])
        return transfer

    def send(self, snapshot: Snapshot, kv: KVCopy | None, transfer: str = "") -> str | None:
        """Sends a session, and returns the route to it, if the other server has one.

        Args:
            snapshot: of the session.
            kv: its KV, without what was sent ahead; None to leave it out.
            transfer: what was sent ahead; empty for nothing.

        Raises:
            MicroturnError: the other server does not take it, or does not answer. In the latter case it may have it.
        """
        body: list[Piece] = [sealed(snapshot, kv, is_checked=False)]
        if kv is not None:
            body.extend(kv.pages.contents())
        route: str | None = self.ask("PUT", f"/sessions/{transfer}", body)["route"]
        return route

    def ask(self, method: str, path: str, body: Sequence[Piece]) -> Any:
        """Sends a request and returns what was answered.

        Raises:
            MicroturnError: the error that was answered; Unavailable where nothing was.
        """
        headers = {**self._headers, "content-length": str(sum(len(piece) for piece in body))}
        try:
            self._http.request(method, path, iter(body), headers)
            response = self._http.getresponse()
            told = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unavailable(f"no answer from the server on {self._name}: {error}") from error
        if "error" in told:
            raise error_of(told["error"]["code"], f"{self._name}: {told['error']['message']}")
        return told


def _resolve(address: Address) -> list[Address]:
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        log.debug("%s:%d: %s", *address, error)
        return []
    return [(str(place[4][0]), int(place[4][1])) for place in found]
