"""A connection to another server, by which one session is handed over, or a question asked; see `peer_server`."""

from __future__ import annotations

import http.client
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from microturn.admin.peer_address import Address
from microturn.engine.moving import Mark
from microturn.errors import Unavailable, error_of
from microturn.offload.copies import KVCopy
from microturn.sessions.turn import SessionId
from microturn.snapshots.file import sealed
from microturn.snapshots.kv_files import head_of
from microturn.snapshots.snapshot import Snapshot

Piece = bytes | bytearray | memoryview
EPOCH_BEFORE = "x-epoch-before"
ENOUGH = "x-enough-sessions"

# How long a session may be held, or KV be sent while it goes on, without anything getting through.
_HELD_S, _AHEAD_S = 3.0, 10.0
# How much longer it may be held to hear what has become of it.
_DROP_S = 1.0


class NoAnswer(Unavailable):
    """Something may listen there, and gives no answer."""


class Refused(Unavailable):
    """Nothing listens there."""


class PeerConnection:
    """A connection to another server's port for sessions: see `peer_server`.

    Args:
        address: of it.
        key: that all servers share; empty where they need none.
        timeout_s: of each answer.
        enough: the number of sessions with which the other server takes no more by it; None for its limit.
    """

    def __init__(self, address: Address, key: str, timeout_s: float, enough: int | None = None) -> None:
        self._name = f"{address[0]}:{address[1]}"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        if enough is not None:
            self._headers[ENOUGH] = str(enough)
        self._http = http.client.HTTPConnection(*address, timeout=timeout_s)

    def open(self) -> None:
        """Connects, which otherwise the first request does.

        Raises:
            Unavailable: nothing listens there, or it does not answer.
        """
        try:
            self._http.connect()
        except ConnectionRefusedError as error:
            raise Refused(f"nothing listens on {self._name}") from error
        except OSError as error:
            raise NoAnswer(f"no answer from the server on {self._name}: {error}") from error

    def close(self) -> None:
        self._http.close()

    def send_ahead(self, kv: KVCopy) -> str:
        """Sends KV whose session will follow, and returns the name by which that refers to it.

        Raises:
            MicroturnError: the other server does not take it, or does not answer.
        """
        transfer = secrets.token_hex(8)
        self._wait_for(_AHEAD_S)
        self.ask("PUT", f"/kv/{transfer}", [head_of(kv, is_checked=False), *kv.pages.contents()])
        return transfer

    def send(self, snapshot: Snapshot, kv: KVCopy | None, transfer: str = "", *, epoch_before: int) -> str | None:
        """Sends a session, and returns the route to it, if the other server has one.

        Args:
            snapshot: of the session.
            kv: its KV, without what was sent ahead; None to leave it out.
            transfer: what was sent ahead; empty for nothing.
            epoch_before: that the session had before.

        Raises:
            MicroturnError: the other server does not take it, or does not answer. In the latter case it may have it.
        """
        body: list[Piece] = [sealed(snapshot, kv, is_checked=False)]
        if kv is not None:
            body.extend(kv.pages.contents())
        self._wait_for(_HELD_S)
        route: str | None = self.ask("PUT", f"/sessions/{transfer}", body, {EPOCH_BEFORE: str(epoch_before)})["route"]
        return route

    def drop(self, session_id: SessionId, mark: Mark) -> tuple[bool, str | None]:
        """Has the other server end a session that it was sent, if it has had no turn there.

        Args:
            session_id: of the session.
            mark: of what was sent, as it came there.

        Returns:
            Whether it goes on there since it had one, and the route to that server, if it has one.

        Raises:
            MicroturnError: it does not answer.
        """
        self._http.close()  # an answer may be under way
        self._wait_for(_DROP_S)
        told = self.ask("POST", "/drop", [json.dumps({"id": session_id, **mark._asdict()}).encode()])
        return told["goes_on"], told["route"]

    def _wait_for(self, timeout_s: float) -> None:
        """Gives an answer so much time, and each piece of what is sent."""
        self._http.timeout = timeout_s
        if self._http.sock is not None:
            self._http.sock.settimeout(timeout_s)

    def ask(self, method: str, path: str, body: Sequence[Piece], more: Mapping[str, str] | None = None) -> Any:
        """Sends a request and returns what was answered.

        Raises:
            MicroturnError: the error that was answered; Unavailable where nothing was.
        """
        headers = {**self._headers, **(more or {}), "content-length": str(sum(len(piece) for piece in body))}
        try:
            self._http.request(method, path, iter(body), headers)
            response = self._http.getresponse()
            told = json.loads(response.read())
        except ConnectionRefusedError as error:
            raise Refused(f"nothing listens on {self._name}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(f"no answer from the server on {self._name}: {error}") from error
        if "error" in told:
            raise error_of(told["error"]["code"], f"{self._name}: {told['error']['message']}")
        return told
