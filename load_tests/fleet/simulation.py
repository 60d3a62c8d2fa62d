"""Sessions over replicas, some of which are lost: who moves, what that costs, and how long it takes.

A simulation of the deployment's rules, not of its packets. A session stays with its replica (`stateful_session`); where
it has none, `placement` finds one. So only sessions of a lost replica move, and one that comes back is filled by those
that open. What was on a lost replica is computed again from its tokens, or read from a shared volume where its KV was
saved. Of one that is killed only snapshots taken before would be there: read "volume" for it as a fleet that keeps them
up to date.

A replica restores one session after the other. Computing has the time that its turns leave, at least `least_share`, as
the engine keeps a part of each step for long prompts; reading has its network, and a fair share of the volume. Who
waits misses turns; where there are more sessions than a replica serves on time, as many miss theirs.

Assumed: sessions are on the beat all the time and have contexts of one length; edge and volume are never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from load_tests.fleet.placement import Ints, Placement

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fleet:
    """What is assumed. The defaults are Llama-3.1-8B, an H200 per replica, as `microturn plan` has it.

    Attributes:
        sessions: at any time; who leaves is followed by somebody new.
        capacity: sessions that a replica serves on time.
        headroom: share of all capacity that is free while nothing is lost; so many replicas there are.
        beat_s: between two turns of a session.
        context: tokens of each.
        kv_bytes: of a token.
        prefill_tokens_s: that a replica computes in a second of its own.
        network_bytes_s: at which a replica reads the volume.
        volume_bytes_s: at which all of them can read it together.
        detect_s: from a replica's death until its clients are at the next one.
        drain_s: the same of one that says that it stops.
        least_share: of a replica's time, which restoring gets in any case.
        session_s: mean length of a session.
        repair_s: until a lost replica is back, empty.
        edges: Envoys, among which sessions come in by chance.
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
    detect_s: float = 1.0
    drain_s: float = 0.1
    least_share: float = 0.1
    session_s: float = 1200.0
    repair_s: float = 300.0
    edges: int = 3
    zones: int = 10
    seed: int = 0

    @property
    def replicas(self) -> int:
        return max(2, -int(-self.sessions // (self.capacity * (1 - self.headroom))))


@dataclass(frozen=True)
class Loss:
    """Replicas that go at once.

    Attributes:
        name: for people.
        at_s: when.
        replicas: their numbers.
        is_drained: whether they say so before.
    """

    name: str
    at_s: int
    replicas: Sequence[int]
    is_drained: bool = False


@dataclass(frozen=True)
class Moved:
    """What a loss did.

    Attributes:
        loss: that it was.
        sessions: that were on the lost replicas, and moved.
        peak_load: of the fullest replica afterwards, by its capacity.
        pauses_s: of each of these sessions, from the loss until it is served again.
        bytes_read: from the volume.
        tokens_computed: again.
    """

    loss: Loss
    sessions: Ints
    peak_load: float
    pauses_s: Floats
    bytes_read: float
    tokens_computed: int


@dataclass(frozen=True)
class Course:
    """What was seen, second by second.

    Attributes:
        moved: per loss.
        mean_load: of the replicas that live, by their capacity.
        peak_load: of the fullest.
        waiting: sessions that are being restored.
        late_turns: of sessions that are served, for want of time on their replica.
    """

    moved: list[Moved]
    mean_load: Floats
    peak_load: Floats
    waiting: Floats
    late_turns: Floats


def losses_of(fleet: Fleet) -> list[Loss]:
    """One replica killed, one drained, one zone lost; each long enough after the one before."""
    zone = range(0, fleet.replicas, fleet.zones)
    return [
        Loss("one killed", 300, [fleet.replicas // 3]),
        Loss("one drained", 900, [fleet.replicas // 2], is_drained=True),
        Loss("a zone lost", 1500, zone),
    ]


def simulate(fleet: Fleet, losses: Sequence[Loss], restored_from: str, length_s: int = 2700) -> Course:
    """Runs the fleet, a second at a time.

    Args:
        fleet: what is assumed.
        losses: in the order of time.
        restored_from: `tokens` or `volume`.
        length_s: of the run.
    """
    random = np.random.default_rng(fleet.seed)
    placement = Placement(fleet.edges, fleet.replicas, fleet.capacity, random)
    alive = placement.alive
    edges = random.integers(fleet.edges, size=fleet.sessions)
    owners = placement.place(edges)
    ready_s = np.zeros(fleet.sessions)  # when it is served again
    busy_s = np.zeros(fleet.replicas)  # until when a replica restores
    course = Course([], *(np.zeros(length_s) for _ in range(4)))
    changes = {loss.at_s: loss for loss in losses}
    repairs = {loss.at_s + round(fleet.repair_s): loss for loss in losses}
    for now_s in range(length_s):
        if now_s in repairs:
            alive[repairs[now_s].replicas] = True
        if now_s in changes:
            loss = changes[now_s]
            alive[loss.replicas] = False
            moving = random.permutation(np.flatnonzero(~alive[owners]))
            placement.end(edges[moving], owners[moving])
            owners[moving] = placement.place(edges[moving])
            load = placement.load()
            busy_s[loss.replicas] = 0.0
            ready_s[moving] = _restore(fleet, loss, owners[moving], load, busy_s, restored_from, random)
            is_read = restored_from == "volume"
            course.moved.append(
                Moved(
                    loss,
                    moving,
                    float(load.max()) / fleet.capacity,
                    ready_s[moving] - now_s,
                    float(len(moving)) * fleet.context * fleet.kv_bytes if is_read else 0.0,
                    0 if is_read else len(moving) * fleet.context,
                )
            )
        # Who leaves is followed by somebody new, who has no replica yet; who waits to be restored stays.
        leaving = random.integers(fleet.sessions, size=random.poisson(fleet.sessions / fleet.session_s))
        leaving = np.unique(leaving[ready_s[leaving] <= now_s])
        placement.end(edges[leaving], owners[leaving])
        edges[leaving] = random.integers(fleet.edges, size=len(leaving))
        owners[leaving] = placement.place(edges[leaving])
        load = placement.load()
        course.mean_load[now_s] = load[alive].mean() / fleet.capacity
        course.peak_load[now_s] = load.max() / fleet.capacity
        course.late_turns[now_s] = np.maximum(load - fleet.capacity, 0).sum() / fleet.beat_s
    for moved in course.moved:
        at_s, num = moved.loss.at_s, np.arange(length_s)
        back = np.sort(at_s + moved.pauses_s)
        course.waiting[:] += np.where(num >= at_s, len(back) - np.searchsorted(back, num, side="right"), 0)
    assert alive[owners].all(), "a session is nowhere"
    return course


def _restore(
    fleet: Fleet,
    loss: Loss,
    targets: Ints,
    load: Ints,
    busy_s: Floats,
    restored_from: str,
    random: np.random.Generator,
) -> Floats:
    """When each session is served again at its target; replicas are busy until they have restored theirs."""
    if restored_from == "tokens":
        spare = np.maximum(1 - load / fleet.capacity, fleet.least_share)
        each_s = fleet.context / (fleet.prefill_tokens_s * spare)
    else:
        share = min(fleet.network_bytes_s, fleet.volume_bytes_s / len(np.unique(targets)))
        each_s = np.full(fleet.replicas, fleet.context * fleet.kv_bytes / share)
    arrival_s = loss.at_s + (fleet.drain_s if loss.is_drained else fleet.detect_s)
    # Each replica's sessions in a random order, one after the other.
    order = random.permutation(len(targets))
    order = order[np.argsort(targets[order], kind="stable")]
    queues, firsts, counts = np.unique(targets[order], return_index=True, return_counts=True)
    places = np.arange(len(order)) - np.repeat(firsts, counts)
    start_s = np.maximum(arrival_s, busy_s)
    ready_s = np.empty(len(targets))
    ready_s[order] = start_s[targets[order]] + (places + 1) * each_s[targets[order]]
    busy_s[queues] = start_s[queues] + counts * each_s[queues]
    return ready_s


def missed_beats(fleet: Fleet, pauses_s: Floats) -> Ints:
    """Turns that each session misses while it waits."""
    missed: Ints = np.ceil(pauses_s / fleet.beat_s).astype(np.int64)
    return missed
