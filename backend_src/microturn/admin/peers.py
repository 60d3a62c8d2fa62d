"""The other servers of the fleet: which there are, how much is on them, and a session's way to one of them."""

from __future__ import annotations

import json
import logging
import random
import socket
import time
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from microturn.admin.peer_address import Address
from microturn.admin.peer_connection import NoAnswer, PeerConnection
from microturn.errors import MicroturnError, Unavailable
from microturn.sessions.table import moved
from microturn.sessions.turn import TurnRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

# Within so long the edge has found a new server in the DNS, and seen that it is healthy.
SETTLED_S = 5.0

_QUESTION_S = 1.0
# How far apart two questions are to which a dead server gave no answer, and after how long it is asked again.
_DEAD_S, _FORGIVEN_S = 3.0, 12.0
# How long another server may take to hand a session over.
_SESSION_S = 10.0
_NUM_ASKED_AT_ONCE = 32


# Finds the servers that there are, those that have just gone perhaps among them. Where there may be others it raises
# Unavailable behind those that it has found. Called in any thread.
FindServers = Callable[[], Iterable[Address]]


def by_name(addresses: Iterable[Address]) -> FindServers:
    """Finds servers by the system's names: of a name with several addresses each is a server."""
    names = tuple(addresses)

    def find() -> Iterator[Address]:
        unresolved: OSError | None = None
        for address in names:
            try:
                yield from _resolve(address)
            except OSError as error:
                unresolved = error
        if unresolved is not None:
            raise Unavailable(f"a name of other servers cannot be resolved now: {unresolved}") from unresolved

    return find


@dataclass(frozen=True)
class Peer:
    """Another server, and what it said of itself.

    Attributes:
        address: where it takes sessions.
        num_sessions: that live there, or are about to.
        max_sessions: that may.
        is_leaving: whether it takes no more sessions.
        instance: names its process.
        model: fingerprint of its model.
        age_s: since when it takes sessions.
    """

    address: Address
    num_sessions: int
    max_sessions: int
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
        find: the addresses of the servers that there are; this one may be among them.
        key: that all servers share; empty where they need none.
        instance: names this process.
        port: where this server takes sessions.
    """

    def __init__(self, find: FindServers, key: str, instance: str, port: int) -> None:
        self._find = find
        self._key = key
        self._instance = instance
        self._port = port
        self._silent = _Silent()
        self._has_found_all = True
        self._threads = ThreadPoolExecutor(_NUM_ASKED_AT_ONCE, "microturn-peers")

    def others(self, model: str, most: int | None = None) -> list[Peer]:
        """The other servers of a model that answer and take sessions, the emptiest first.

        Those that have just come are left out, unless there are no others: the edge may not know them yet.

        Args:
            model: fingerprint of it.
            most: so many are asked, drawn by chance; None asks all.
        """
        found, _ = self._ask_all(self._load_of, most)
        others = [peer for peer in found if peer.instance != self._instance and peer.model == model]
        others = sorted((peer for peer in others if not peer.is_leaving), key=lambda peer: peer.share)
        return [peer for peer in others if peer.age_s >= SETTLED_S] or others

    @property
    def may_answer_later(self) -> bool:
        """Whether there are servers that were not found, or gave no answer, the last time; the dead are asked again."""
        return not self._has_found_all or bool(self._silent)

    def fetch(self, request: TurnRequest) -> bool:
        """Has a session handed over to this server; returns whether it lived on another one.

        Args:
            request: what its client comes back with; a session of another client is not found.

        Raises:
            Unavailable: it lives on another server and stays there, with the route to it, if there is one; or a server
                that may have it gives no answer.
        """
        options = request.options
        asked: dict[str, Any] = {"id": request.session_id}
        asked |= {"port": self._port, "session_key": options.get("session_key"), "tenant": options.get("tenant")}
        places, is_complete = self._ask_all(lambda address: (address, self._ask(address, "POST", "/find", asked)))
        # A copy that was left behind by a hand-over whose answer was lost has a lower epoch.
        places = [place for place in places if place[1].get("epoch") is not None]
        if not places:
            if is_complete:
                return False
            raise Unavailable("a server that may have the session gives no answer: try again", retry_after_ms=500)
        address, found = max(places, key=lambda place: place[1]["epoch"])
        try:
            self._ask(address, "POST", "/give", asked, timeout_s=_SESSION_S)
        except MicroturnError as error:
            log.info("session %s stays where it is: %s", request.session_id, error)
            raise moved(found["route"]) from error
        return True

    @contextmanager
    def connect(self, address: Address, enough: int | None = None) -> Iterator[PeerConnection]:
        """A connection by which one session is handed over.

        Args:
            address: of the other server.
            enough: the number of sessions with which it takes no more of them; None for its limit.

        Raises:
            Unavailable: nothing listens there, or it does not answer.
        """
        connection = PeerConnection(address, self._key, _QUESTION_S, enough)
        try:
            connection.open()
            yield connection
        finally:
            connection.close()

    def close(self) -> None:
        """Asks no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load_of(self, address: Address) -> Peer:
        said = self._ask(address, "GET", "/load")
        return Peer(address=address, **{one.name: said[one.name] for one in fields(Peer) if one.name != "address"})

    def _ask(
        self, address: Address, method: str, path: str, question: Any = None, timeout_s: float = _QUESTION_S
    ) -> Any:
        connection = PeerConnection(address, self._key, timeout_s)
        try:
            return connection.ask(method, path, [] if question is None else [json.dumps(question).encode()])
        finally:
            connection.close()

    def _ask_all(self, ask: Callable[[Address], T], most: int | None = None) -> tuple[list[T], bool]:
        """The answers of those that give one, and whether no other may live: see `_Silent`."""

        def ask_one(address: Address) -> T | None:
            try:
                answer = ask(address)
            except NoAnswer as error:
                log.debug("%s", error)
                self._silent.note(address)
                return None
            except (MicroturnError, KeyError, TypeError) as error:  # also of another version
                log.debug("%s:%d: %s", *address, error)
                answer = None
            self._silent.forget(address)
            return answer

        found, has_found_all = self._find_all()
        dead = self._silent.dead()
        asked = [address for address in found if address not in dead]
        if most is not None:
            asked = random.sample(asked, min(most, len(asked)))
        answers = [answer for answer in self._threads.map(ask_one, asked) if answer is not None]
        return answers, has_found_all and not self._silent.may_live(asked)

    def _find_all(self) -> tuple[list[Address], bool]:
        """The servers that were found, each once, and whether there are no others."""
        found: dict[Address, None] = {}
        try:
            for address in self._find():
                found[address] = None
        except Unavailable as error:
            log.debug("%s", error)
            self._has_found_all = False
        else:
            self._has_found_all = True
            self._silent.keep(found)
        return list(found), self._has_found_all


@dataclass(frozen=True)
class _Silence:
    """The first and the last question to which a server gave no answer, by `time.monotonic`."""

    first_s: float
    last_s: float

    @property
    def is_dead(self) -> bool:
        return self.last_s - self.first_s >= _DEAD_S

    @property
    def is_over(self) -> bool:
        """Whether it is so long ago that it says little of now."""
        return time.monotonic() - self.last_s > _FORGIVEN_S


class _Silent:
    """Servers that listen, or may, and gave no answer. One that gives none for long is taken for dead, for a while."""

    def __init__(self) -> None:
        self._silences: dict[Address, _Silence] = {}

    def note(self, address: Address) -> None:
        now_s = time.monotonic()
        silence = self._silences.get(address)
        # One that was dead is so at once again. Two pauses without a question in between are not one long silence.
        if silence is None or (silence.is_over and not silence.is_dead):
            silence = _Silence(now_s, now_s)
        self._silences[address] = replace(silence, last_s=now_s)

    def __len__(self) -> int:
        return len(self._silences)

    def forget(self, address: Address) -> None:
        self._silences.pop(address, None)

    def keep(self, found: Container[Address]) -> None:
        """Forgets those that are not there any more."""
        for address in list(self._silences):
            if address not in found:
                self.forget(address)

    def dead(self) -> set[Address]:
        """Those that need not be asked."""
        silences = list(self._silences.items())
        return {address for address, silence in silences if silence.is_dead and not silence.is_over}

    def may_live(self, addresses: Iterable[Address]) -> bool:
        """Whether any was silent, and not for long."""
        silences = [self._silences.get(address) for address in addresses]
        return any(silence is not None and not silence.is_dead for silence in silences)


def _resolve(address: Address) -> list[Address]:
    """The addresses of a name; none where there is no such name.

    Raises:
        OSError: that is not known now.
    """
    try:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno not in (socket.EAI_NONAME, socket.EAI_NODATA):
            raise
        log.debug("%s:%d: %s", *address, error)
        return []
    return [(str(place[4][0]), int(place[4][1])) for place in found]
