"""What is assumed of a fleet, and what has been measured; which of its replicas are lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Fleet:
    """What a simulation goes by.

    Load defaults are those of Llama-3.1-8B, an H200 per replica, as `microturn plan` has it: assumed. "Measured" is on
    two shared cores (AMD Zen 5) over the loopback; docs/scale.md says by what.

    Attributes:
        sessions: at any time; who leaves is followed by somebody new.
        capacity: sessions that a replica serves on time.
        headroom: share of all capacity that is free while nothing is lost; so many replicas there are.
        beat_s: seconds between two turns of a session.
        context: tokens of each session.
        kv_bytes: bytes of a token's KV.
        prefill_tokens_s: tokens that a replica computes in a second of its own.
        network_bytes_s: bytes a second that a replica reads or receives.
        volume_bytes_s: bytes a second that all replicas of a cell can read from its volume together.
        connection_bytes_s: bytes a second of KV by one connection between servers: measured, 1.6 to 2.1e9.
        detect_s: seconds from a replica's death until its clients are at the next one: measured, 0.28 to 0.75.
        frozen_s: the same of one that goes without a word: measured, 1.9.
        forget_s: seconds from then on until the others no longer ask it: one question of 1 s, and 3 s (`peers.py`).
        held_s: seconds that a session is held while it is handed over: measured.
        handed_turn_s: seconds of a turn in which its session is handed over, p50: measured.
        handed_turn_most_s: the longest: measured.
        grace_s: seconds that a stop may take: the chart's default.
        drain_notice_s: seconds of it before a session moves: the chart's default.
        drain_share: share of the rest in which sessions go one by one with their KV (`drain.py`).
        moves_per_minute: sessions that a server moves to emptier ones, at most: the chart's default.
        ask_s: seconds of a core that a question to another server costs who asks it: measured, 0.2 to 0.3 ms.
        answer_s: the same of who is asked: measured, 0.4 to 0.6 ms (`questions.py`).
        cell_replicas: replicas of a cell at most, which has a name, edges and a volume of its own; 0 is one cell.
        least_share: share of a replica's time, which restoring gets in any case.
        session_s: mean length of a session, seconds.
        repair_s: seconds until a lost replica is back, empty.
        edges: Envoys of a cell, among which sessions come in by chance.
        zones: over which replicas are spread.
        seed: of all chance.
    """

    sessions: int = 100_000
    capacity: int = 180
    headroom: float = 0.3
    beat_s: float = 0.2
    context: int = 4000
    kv_bytes: int = 131_072
    prefill_tokens_s: float = 20_000.0
    network_bytes_s: float = 3e9
    volume_bytes_s: float = 400e9
    connection_bytes_s: float = 1.7e9
    detect_s: float = 0.5
    frozen_s: float = 1.9
    forget_s: float = 4.0
    held_s: float = 0.008
    handed_turn_s: float = 0.03
    handed_turn_most_s: float = 0.1
    grace_s: float = 90.0
    drain_notice_s: float = 2.0
    drain_share: float = 0.6
    moves_per_minute: float = 60.0
    ask_s: float = 0.0003
    answer_s: float = 0.0006
    cell_replicas: int = 0
    least_share: float = 0.1
    session_s: float = 1200.0
    repair_s: float = 300.0
    edges: int = 3
    zones: int = 10
    seed: int = 0

    @property
    def replicas(self) -> int:
        """Of all cells."""
        return max(2, -int(-self.sessions // (self.capacity * (1 - self.headroom))))

    @property
    def cells(self) -> list[range]:
        """The replicas of each cell, whose sizes differ by one at most."""
        num_cells = -(-self.replicas // self.cell_replicas) if self.cell_replicas else 1
        bounds = [self.replicas * number // num_cells for number in range(num_cells + 1)]
        return [range(begin, end) for begin, end in pairwise(bounds)]

    @property
    def session_bytes(self) -> float:
        """Bytes of a session's KV."""
        return float(self.context) * self.kv_bytes

    @property
    def hand_over_s(self) -> float:
        """Seconds that a server takes to hand one session over: it does so one after the other."""
        return self.session_bytes / min(self.connection_bytes_s, self.network_bytes_s) + self.held_s

    @property
    def drain_s(self) -> float:
        """Seconds in which a replica that stops hands sessions over with their KV."""
        return self.drain_share * (self.grace_s - self.drain_notice_s)


@dataclass(frozen=True)
class Loss:
    """Replicas that go at once.

    Attributes:
        name: for people.
        at_s: when.
        replicas: their numbers.
        is_drained: whether they say so before, and hand their sessions over.
        is_silent: whether their machines are gone: connections to them are not refused, but get no answer.
    """

    name: str
    at_s: int
    replicas: Sequence[int]
    is_drained: bool = False
    is_silent: bool = False

    def within(self, cell: range) -> Loss | None:
        """What a cell loses, by its own numbers; None if nothing."""
        lost = np.asarray(self.replicas)
        lost = lost[(lost >= cell.start) & (lost < cell.stop)] - cell.start
        kinds = (self.is_drained, self.is_silent)
        return Loss(self.name, self.at_s, lost.tolist(), *kinds) if len(lost) else None


def losses_of(fleet: Fleet) -> list[Loss]:
    """One replica killed, one drained, one zone lost; each long enough after the one before."""
    zone = range(0, fleet.replicas, fleet.zones)
    return [
        Loss("one killed", 300, [fleet.replicas // 3]),
        Loss("one drained", 900, [fleet.replicas // 2], is_drained=True),
        Loss("a zone lost", 1500, zone, is_silent=True),
    ]
