"""A fleet under a virtual clock whose servers are the real `Rebalancer` over the real `Peers`: only engine, network and
time are stood in for. Of the engine it has what `next_resting` reads.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from microturn.admin.peer_address import Address
from microturn.admin.peers import Peers
from microturn.admin.rebalancer import Rebalancer
from microturn.engine.moving import Load
from microturn.errors import MicroturnError, ResourceExhausted, Unavailable

# Between what a server says of itself, and when a session comes that is sent for it: KV is copied first.
_LATE_S = 0.2
# A connection, and what a server receives by all of them, in sessions a second: docs/scale.md.
_CONNECTION_S, _NETWORK_S = 0.3, 0.17


@dataclass(eq=False)
class Session:
    """Of the engine's what `next_resting` reads."""

    id: int
    last_activity_s: float
    rests: bool = True


@dataclass(eq=False)
class Replica:
    """A server, and what it does with its sessions.

    Attributes:
        at: where it takes sessions.
        max_sessions: that may live there.
        joined_s: when it joined.
        refuses: what it says to all that is sent; None if it takes it.
    """

    at: Address
    max_sessions: int
    joined_s: float
    sessions: dict[int, Session] = field(default_factory=dict)
    is_leaving: bool = False
    refuses: MicroturnError | None = None
    free_at_s: float = 0.0
    num_coming: int = 0
    came_s: dict[int, float] = field(default_factory=dict)
    counted: list[tuple[float, int]] = field(default_factory=list)

    def said(self, at_s: float) -> int:
        """How many sessions it had at some time, with those on their way."""
        place = bisect_right(self.counted, at_s, key=lambda one: one[0])
        return self.counted[max(0, place - 1)][1]


class SimulatedFleet:
    """Replicas that look at each other every two seconds.

    Attributes:
        now_s: since the start.
        replicas: all of them.
        num_moves: of each session.
        num_refused: how often one was sent that was not taken.

    Args:
        counts: sessions on each replica.
        moves_per_minute: of each.
        max_sessions: of each.
        seed: of all chance.
    """

    def __init__(
        self, counts: Sequence[int], moves_per_minute: float = 60.0, max_sessions: int = 180, seed: int = 0
    ) -> None:
        self.now_s = 0.0
        self.replicas: list[Replica] = []
        self.num_moves: Counter[int] = Counter()
        self.num_refused = 0
        self.random = random.Random(seed)
        self._moves_per_minute = moves_per_minute
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._num_due = self._num_sessions = 0
        self._by_address: dict[Address, Replica] = {}
        random.seed(seed)  # of `Peers`
        for count in counts:
            self.add(count, max_sessions, age_s=100.0)

    def add(self, num_sessions: int = 0, max_sessions: int = 180, age_s: float = 0.0) -> Replica:
        """A replica joins."""
        replica = Replica(("10.0.0.1", len(self.replicas)), max_sessions, self.now_s - age_s)
        self.replicas.append(replica)
        self._by_address[replica.at] = replica
        for _ in range(num_sessions):
            self.open(replica)
        peers, receiver = _SimulatedPeers(self, replica), _receiver(self, replica)
        rebalancer = Rebalancer(_engine(self, replica), peers, receiver, self._moves_per_minute)
        replica.counted = [(-1e9, num_sessions)]

        def look() -> None:
            self._sent_s = 0.0
            pause_s = rebalancer.look()
            self.at(self.now_s + self._sent_s + pause_s, look)

        self.at(self.now_s + 2.0 * self.random.random(), look)
        return replica

    def open(self, replica: Replica) -> None:
        """A session begins."""
        self._num_sessions += 1
        replica.sessions[self._num_sessions] = Session(self._num_sessions, self.now_s + self.random.random())
        self._count(replica)

    def end(self, replica: Replica) -> None:
        """One of its sessions ends."""
        del replica.sessions[self.random.choice(list(replica.sessions))]
        self._count(replica)

    def at(self, at_s: float, do: Callable[[], None]) -> None:
        """Has something done later."""
        self._num_due += 1
        heapq.heappush(self._due, (at_s, self._num_due, do))

    def run(self, length_s: float) -> None:
        until_s = self.now_s + length_s
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._due)
            do()
        self.now_s = until_s

    def send(self, here: Replica, session_id: int, there: Replica, enough: int) -> bool:
        """The session is there when its KV has gone by the network."""
        if there.refuses is not None:
            self.num_refused += 1
            raise there.refuses
        if there.is_leaving:
            raise Unavailable("it is stopping")
        if len(there.sessions) + there.num_coming >= enough:
            self.num_refused += 1
            raise ResourceExhausted("there are enough")
        there.num_coming += 1
        self._count(there)
        there.free_at_s = max(there.free_at_s, self.now_s) + _NETWORK_S
        done_s = max(self.now_s + _CONNECTION_S, there.free_at_s)
        self._sent_s = done_s - self.now_s
        session = here.sessions[session_id]
        session.rests = False

        def arrive() -> None:
            session.rests = True
            there.num_coming -= 1
            if here.sessions.pop(session_id, None) is None:
                self._count(there)
                return  # it has ended
            session.last_activity_s = self.now_s  # its client comes at once
            there.sessions[session_id] = session
            there.came_s[session_id] = self.now_s
            self.num_moves[session_id] += 1
            self._count(here)
            self._count(there)

        self.at(done_s, arrive)
        return True

    def _count(self, replica: Replica) -> None:
        replica.counted.append((self.now_s, len(replica.sessions) + replica.num_coming))

    def load_of(self, address: Address) -> dict[str, Any]:
        """What a server answers to `GET /load`."""
        replica = self._by_address[address]
        return {
            "num_sessions": replica.said(self.now_s - _LATE_S),
            "max_sessions": replica.max_sessions,
            "is_leaving": replica.is_leaving,
            "instance": str(address[1]),
            "model": "a model",
            "age_s": self.now_s - replica.joined_s,
        }

    @property
    def mean(self) -> float:
        """Sessions of a replica."""
        return sum(len(one.sessions) for one in self.replicas) / len(self.replicas)

    @property
    def peak(self) -> int:
        """Sessions of the fullest."""
        return max(len(one.sessions) for one in self.replicas)

    @property
    def addresses(self) -> Iterator[Address]:
        return iter(self._by_address)


class _SimulatedPeers(Peers):
    """Asks without a network, one after the other."""

    def __init__(self, fleet: SimulatedFleet, here: Replica) -> None:
        super().__init__(lambda: fleet.addresses, "", str(here.at[1]), here.at[1])
        self._threads: Any = SimpleNamespace(map=map)
        self._fleet = fleet

    def _ask(self, address: Address, method: str, path: str, *_: Any, **__: Any) -> Any:
        assert (method, path) == ("GET", "/load")
        return self._fleet.load_of(address)

    @contextmanager
    def connect(self, address: Address, enough: int | None = None) -> Iterator[Any]:
        yield self._fleet._by_address[address], enough


def _engine(fleet: SimulatedFleet, replica: Replica) -> Any:
    """Calls at once."""

    class Sessions:
        @property
        def load(self) -> Load:
            return Load(len(replica.sessions), replica.max_sessions, replica.is_leaving, 0, 0, 0)

        @property
        def _sessions(self) -> list[Session]:
            return list(replica.sessions.values())

    return SimpleNamespace(
        call=lambda do: do(Sessions()),
        environment=SimpleNamespace(model_fingerprint="a model"),
        send=lambda session_id, there: fleet.send(replica, session_id, *there),
    )


def _receiver(fleet: SimulatedFleet, replica: Replica) -> Any:
    def came_lately() -> set[int]:
        return {session_id for session_id, came_s in replica.came_s.items() if fleet.now_s - came_s < 60}

    return SimpleNamespace(came_lately=came_lately)


def send_simulated(engine: Any, session_id: int, there: tuple[Replica, int]) -> bool:
    """In place of `send_to_peer`."""
    sent: bool = engine.send(session_id, there)
    return sent
