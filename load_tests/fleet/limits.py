"""What breaks first as a fleet grows: of each resource that its sessions or replicas share, the use by its limit.

Arithmetic without chance, of the largest cell: it is filled evenly, and loses a zone at once. A resource whose use does
not depend on the size (`grows` is False) is broken at any size or at none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from load_tests.fleet.fleet import Fleet
from microturn.admin.rebalancer import NUM_ASKED, PAUSE_S, TOLERANCE

# Of `peers.py`: how many are asked at once.
_NUM_ASKED_AT_ONCE = 32
# Of deploy/envoy/envoy.yaml, of one Envoy; and how many replicas it draws for a stream.
_MAX_STREAMS, _MAX_CONNECTIONS, _NUM_DRAWN = 65_536, 20_000, 5
# A message of the DNS has 65,535 bytes (RFC 1035), each address in it 16 with its name compressed; header and question.
_DNS_BYTES, _DNS_ADDRESS_BYTES, _DNS_HEAD_BYTES = 65_535, 16, 100


@dataclass(frozen=True)
class Bounds:
    """What is taken for too much: all assumed.

    Attributes:
        question_share: share of a core that a server may spend on questions while nothing happens.
        zone_questions_s: seconds of a core that it may spend on them when a zone is lost.
        sessions_per_connection: of clients to an Envoy; 1 is people with a client each, a gateway has many.
        start_s: seconds until a replica serves that has been replaced.
        rollout_s: seconds that a rollout may take, one replica of a cell at a time.
    """

    question_share: float = 0.1
    zone_questions_s: float = 1.0
    sessions_per_connection: float = 1.0
    start_s: float = 60.0
    rollout_s: float = 8 * 3600.0


@dataclass(frozen=True)
class Resource:
    """One that is shared.

    Attributes:
        name: short, for tables and pictures.
        unit: of use and limit.
        use: of it.
        limit: from which on it is too much.
        grows: whether its use depends on the size.
    """

    name: str
    unit: str
    use: float
    limit: float
    grows: bool = True

    @property
    def ratio(self) -> float:
        """Use by limit: above 1 it is broken."""
        return self.use / self.limit

    @property
    def is_broken(self) -> bool:
        return self.ratio > 1


def resources(fleet: Fleet, bounds: Bounds | None = None) -> list[Resource]:
    """All of them, in the fleet's largest cell."""
    bounds = bounds or Bounds()
    num_cells, replicas = len(fleet.cells), max(len(cell) for cell in fleet.cells)
    sessions = fleet.sessions / num_cells
    each = sessions / replicas
    lost = max(1.0, replicas / fleet.zones)
    live = max(1.0, replicas - lost)
    moved = sessions * lost / replicas
    question_s, others = fleet.ask_s + fleet.answer_s, replicas - 1
    look_s = PAUSE_S if fleet.moves_per_minute else math.inf
    share = min(live * fleet.network_bytes_s, fleet.volume_bytes_s)
    left = max(fleet.least_share, 1 - sessions / live / fleet.capacity)
    computing_s = moved / live * fleet.context / (fleet.prefill_tokens_s * left)
    edges_left = max(1, fleet.edges - 1)
    drain_s = each * fleet.hand_over_s
    stop_s = fleet.drain_notice_s + min(drain_s, fleet.drain_s)
    return [
        # A server asks all for each of its new sessions, and is asked by all for theirs: once for each that moved.
        Resource("look-ups, zone lost", "core s of a server", moved * question_s, bounds.zone_questions_s),
        Resource("load questions", "of a core", min(others, NUM_ASKED) / look_s * question_s, bounds.question_share),
        Resource("one look-up", "s", others * fleet.ask_s, fleet.detect_s),
        Resource("silent replicas, zone lost", "asked at once", lost, _NUM_ASKED_AT_ONCE),
        Resource("volume, zone lost", "s to read", moved * fleet.session_bytes / share, computing_s),
        Resource("streams of an Envoy", "one lost", sessions / edges_left, _MAX_STREAMS),
        Resource(
            "connections of an Envoy",
            "one lost",
            sessions / bounds.sessions_per_connection / edges_left,
            _MAX_CONNECTIONS,
        ),
        Resource("rollout one by one", "s", replicas * (stop_s + bounds.start_s), bounds.rollout_s),
        Resource("addresses of a name", "B", _DNS_HEAD_BYTES + replicas * _DNS_ADDRESS_BYTES, _DNS_BYTES),
        Resource("drain of a replica", "s", drain_s, fleet.drain_s, grows=False),
        Resource("filling a joined replica", "s", _fill_s(fleet, replicas, each), fleet.repair_s, grows=False),
    ]


def _fill_s(fleet: Fleet, replicas: int, each: float) -> float:
    """Until a replica that joins has its share."""
    opening_s = fleet.session_s / min(_NUM_DRAWN, replicas)  # it is drawn so many times as often as one in all
    if not fleet.moves_per_minute:
        return opening_s
    # So many others ask it at each look; one that has handed a session over looks again as soon as it may.
    num_asking = min(replicas - 1, NUM_ASKED)
    finds = num_asking / (replicas - 1)
    moves_s = num_asking / (finds * 60 / fleet.moves_per_minute + (1 - finds) * PAUSE_S)
    return min(opening_s, (1 - TOLERANCE) * each / min(moves_s, fleet.network_bytes_s / fleet.session_bytes))


def breaks_at(fleet: Fleet, name: str, bounds: Bounds | None = None, most: int = 10**9) -> int | None:
    """The number of sessions in one cell from which on a resource is broken; None if up to `most` it is not."""

    def is_broken(sessions: int) -> bool:
        one = replace(fleet, sessions=sessions, cell_replicas=0)
        return next(resource for resource in resources(one, bounds) if resource.name == name).is_broken

    if not is_broken(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_broken(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Verdict:
    """What a fleet's size breaks.

    Attributes:
        fleet: that it is of.
        broken: resources that grow, with the number of sessions in one cell that breaks each; the first to break first.
        broken_always: resources that do not grow.
    """

    fleet: Fleet
    broken: Sequence[tuple[Resource, int]]
    broken_always: Sequence[Resource]


def judge(fleet: Fleet, bounds: Bounds | None = None) -> Verdict:
    """What of a fleet is broken."""
    broken = [one for one in resources(fleet, bounds) if one.is_broken]
    sizes = [(one, breaks_at(fleet, one.name, bounds)) for one in broken if one.grows]
    known = [(one, size) for one, size in sizes if size is not None]
    return Verdict(fleet, sorted(known, key=lambda pair: pair[1]), [one for one in broken if not one.grows])


def largest_cell(fleet: Fleet, bounds: Bounds | None = None) -> int:
    """Replicas of the largest cell in which nothing that grows is broken when it is full.

    Args:
        fleet: what is assumed; its number of sessions does not matter.
        bounds: see there.
    """
    names = [one.name for one in resources(fleet, bounds) if one.grows]
    sizes = [size for name in names if (size := breaks_at(fleet, name, bounds)) is not None]
    return replace(fleet, sessions=min(sizes)).replicas - 1 if sizes else fleet.replicas
