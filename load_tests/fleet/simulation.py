"""Sessions over replicas, some of which are lost: who moves, what that costs, and how long it takes.

A simulation of the deployment's rules, not of its packets. A session stays with its replica (`stateful_session`); where
it has none, `placement` finds one. So only sessions of a lost replica move. What was on one that is killed is computed
again from its tokens, or read from a shared volume where its KV was saved: only snapshots taken before would be there,
so read "volume" for it as a fleet that keeps them up to date. Its client is at another replica after `detect_s`, which
asks all others of the cell for the session before it restores it.

One that is drained hands its sessions over to the emptiest, one after the other with their KV, for a share of its grace
time. The others are refused then, and restored as if it had been killed. One that comes back is filled by sessions that
open, and by the rebalancers of those that have more.

A replica restores one session after the other. Computing has the time that its turns leave, at least `least_share`, as
the engine keeps a part of each step for long prompts; reading has its network, and a fair share of the cell's volume.
Who waits misses turns; where there are more sessions than a replica serves on time, as many miss theirs. Cells have
nothing in common; a session belongs to one by chance.

Assumed: sessions are on the beat all the time and have contexts of one length; edge and volume are never lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from load_tests.fleet.fleet import Fleet, Loss
from load_tests.fleet.moving import Floats, Rebalancing, handed_over_s, restore
from load_tests.fleet.placement import Ints, Placement


@dataclass(frozen=True)
class Moved:
    """What a loss did.

    Attributes:
        loss: that it was.
        sessions: that were on the lost replicas, and moved.
        begins_s: when each of these sessions began to wait, seconds since the loss.
        pauses_s: how long each waited to be served again.
        num_handed_over: of them, with their KV by the network.
        bytes_read: from the volume.
        tokens_computed: again.
        peak_load: of the fullest replica when the last of them had left, by its capacity.
    """

    loss: Loss
    sessions: Ints
    begins_s: Floats
    pauses_s: Floats
    num_handed_over: int
    bytes_read: float
    tokens_computed: int
    peak_load: float

    @property
    def done_s(self) -> float:
        """From the loss until the last is served again."""
        return float((self.begins_s + self.pauses_s).max(initial=0.0))


@dataclass(frozen=True)
class Course:
    """What was seen, second by second.

    Attributes:
        moved: per loss.
        num_serving: replicas that have sessions, or take them.
        mean_load: of these, by their capacity.
        peak_load: of the fullest.
        waiting: sessions that are being restored.
        late_turns: of sessions that are served, for want of time on their replica.
        rebalanced: sessions that servers moved to emptier ones.
    """

    moved: list[Moved]
    num_serving: Floats
    mean_load: Floats
    peak_load: Floats
    waiting: Floats
    late_turns: Floats
    rebalanced: Floats


def simulate(fleet: Fleet, losses: Sequence[Loss], restored_from: str, length_s: int = 2700) -> Course:
    """Runs the fleet, a second at a time.

    Args:
        fleet: what is assumed.
        losses: in the order of time.
        restored_from: `tokens` or `volume`: what is not handed over.
        length_s: of the run.
    """
    cells = fleet.cells
    sizes = np.array([len(cell) for cell in cells])
    random = np.random.default_rng(fleet.seed)
    numbers = [fleet.sessions]
    if len(cells) > 1:
        numbers = random.multinomial(fleet.sessions, sizes / sizes.sum()).tolist()
    courses = []
    for number, (cell, num_sessions) in enumerate(zip(cells, numbers, strict=True)):
        within = [lost for loss in losses if (lost := loss.within(cell)) is not None]
        one = replace(fleet, sessions=num_sessions, seed=fleet.seed + number)
        courses.append(_Cell(one, len(cell)).run(within, restored_from, length_s))
    return _together(courses, losses, numbers) if len(cells) > 1 else courses[0]


@dataclass
class _Draining:
    """A loss whose replicas hand over: what has gone so far."""

    loss: Loss
    until_s: float
    sessions: list[Ints] = field(default_factory=list)
    begins_s: list[float] = field(default_factory=list)
    num_due: float = 0.0


class _Cell:
    """Replicas that know each other.

    Args:
        fleet: what is assumed, with the cell's sessions.
        num_replicas: of it.
    """

    def __init__(self, fleet: Fleet, num_replicas: int) -> None:
        self._fleet = fleet
        self._random = np.random.default_rng(fleet.seed)
        self._placement = Placement(fleet.edges, num_replicas, fleet.capacity, self._random)
        self._edges = self._random.integers(fleet.edges, size=fleet.sessions)
        self._owners = self._placement.place(self._edges)
        self._ready_s = np.zeros(fleet.sessions)  # when it is served again
        self._busy_s = np.zeros(num_replicas)  # until when a replica restores
        self._since_s = np.full(num_replicas, -np.inf)  # it takes sessions
        self._rebalancing = Rebalancing(fleet, num_replicas, self._random)
        self._draining: list[_Draining] = []
        self._moved: list[Moved] = []

    def run(self, losses: Sequence[Loss], restored_from: str, length_s: int) -> Course:
        """See `simulate`."""
        fleet, placement, alive = self._fleet, self._placement, self._placement.alive
        course = Course(self._moved, *(np.zeros(length_s) for _ in range(6)))
        changes = {loss.at_s: loss for loss in losses}
        repairs = {loss.at_s + round(fleet.repair_s): loss for loss in losses}
        for now_s in range(length_s):
            if now_s in repairs:
                alive[repairs[now_s].replicas] = True
                self._since_s[repairs[now_s].replicas] = now_s
            if now_s in changes:
                self._lose(changes[now_s], restored_from)
            for draining in list(self._draining):
                self._drain(draining, now_s, restored_from)
            self._renew(now_s)
            rests = self._ready_s <= now_s
            age_s: Floats = float(now_s) - self._since_s
            moving, targets = self._rebalancing.move(float(now_s), placement, age_s, self._owners, rests)
            self._move(moving, targets)
            load = placement.load()
            course.num_serving[now_s] = (alive | (load > 0)).sum()
            course.mean_load[now_s] = load.sum() / course.num_serving[now_s] / fleet.capacity
            course.peak_load[now_s] = load.max() / fleet.capacity
            course.late_turns[now_s] = np.maximum(load - fleet.capacity, 0).sum() / fleet.beat_s
            course.rebalanced[now_s] = len(moving)
        for moved in self._moved:
            num = np.arange(length_s) - moved.loss.at_s
            begun, back = np.sort(moved.begins_s), np.sort(moved.begins_s + moved.pauses_s)
            course.waiting[:] += np.searchsorted(begun, num, side="right") - np.searchsorted(back, num, side="right")
        assert self._draining or alive[self._owners].all(), "a session is nowhere"
        return course

    def _move(self, moving: Ints, targets: Ints) -> None:
        self._placement.move(self._edges[moving], self._owners[moving], targets)
        self._owners[moving] = targets

    def _renew(self, now_s: int) -> None:
        """Who leaves is followed by somebody new, who has no replica yet; who waits to be restored stays."""
        num = len(self._owners)
        if not num:
            return
        leaving = np.unique(self._random.integers(num, size=self._random.poisson(num / self._fleet.session_s)))
        leaving = leaving[self._ready_s[leaving] <= now_s]
        self._placement.end(self._edges[leaving], self._owners[leaving])
        self._edges[leaving] = self._random.integers(self._fleet.edges, size=len(leaving))
        self._owners[leaving] = self._placement.place(self._edges[leaving])

    def _lose(self, loss: Loss, restored_from: str) -> None:
        self._placement.alive[loss.replicas] = False
        self._busy_s[loss.replicas] = 0.0
        begins_s = loss.at_s + self._fleet.drain_notice_s
        draining = _Draining(loss, begins_s + self._fleet.drain_s)
        if loss.is_drained:
            self._draining.append(draining)
        else:
            self._end(draining, loss.at_s, restored_from)

    def _drain(self, draining: _Draining, now_s: int, restored_from: str) -> None:
        """Hands over what goes within a second; once the time is over, the others are restored."""
        loss = draining.loss
        left_s = min(now_s + 1.0, draining.until_s) - max(now_s, loss.at_s + self._fleet.drain_notice_s)
        draining.num_due += max(0.0, left_s) / self._fleet.hand_over_s
        num = int(draining.num_due + 1e-9)
        draining.num_due -= num
        for replica in loss.replicas:
            there = self._random.permutation(np.flatnonzero(self._owners == replica))[:num]
            self._move(there, self._placement.emptiest(len(there)))
            draining.sessions.append(there)
            draining.begins_s += [float(now_s - loss.at_s)] * len(there)
        is_empty = not np.isin(self._owners, loss.replicas).any()
        if is_empty or now_s + 1 >= draining.until_s:
            self._draining.remove(draining)
            self._end(draining, now_s + 1, restored_from)

    def _end(self, draining: _Draining, at_s: float, restored_from: str) -> None:
        """Restores what is still on lost replicas, and notes what the loss did."""
        fleet, loss = self._fleet, draining.loss
        handed = np.concatenate([np.zeros(0, np.int64), *draining.sessions])
        moving = self._random.permutation(np.flatnonzero(np.isin(self._owners, loss.replicas)))
        self._placement.end(self._edges[moving], self._owners[moving])
        self._owners[moving] = self._placement.place(self._edges[moving])
        load, num_live = self._placement.load(), int(self._placement.alive.sum())
        # Who is refused by a replica that drains knows at once that it has to go; its turn takes what one takes then.
        wait_s = fleet.handed_turn_s if loss.is_drained else fleet.frozen_s if loss.is_silent else fleet.detect_s
        self._ready_s[moving] = restore(
            fleet, loss, at_s + wait_s, self._owners[moving], load, num_live, self._busy_s, restored_from, self._random
        )
        begins_s = np.concatenate([draining.begins_s, np.full(len(moving), float(at_s - loss.at_s))])
        pauses_s = np.concatenate([handed_over_s(fleet, len(handed), self._random), self._ready_s[moving] - at_s])
        is_read = restored_from == "volume"
        self._moved.append(
            Moved(
                loss,
                np.concatenate([handed, moving]),
                begins_s,
                pauses_s,
                len(handed),
                len(moving) * fleet.session_bytes if is_read else 0.0,
                0 if is_read else len(moving) * fleet.context,
                float(load.max()) / fleet.capacity,
            )
        )


def _together(courses: Sequence[Course], losses: Sequence[Loss], numbers: Sequence[int]) -> Course:
    """What all cells went through; a session has the number of its cell's first one besides its own."""
    firsts = np.cumsum([0, *numbers])
    num_serving = np.sum([course.num_serving for course in courses], axis=0)
    peak_load = np.max([course.peak_load for course in courses], axis=0)
    moved = []
    for loss in losses:
        parts = [(first, one) for first, course in zip(firsts, courses, strict=False) for one in course.moved]
        parts = [(first, one) for first, one in parts if (one.loss.name, one.loss.at_s) == (loss.name, loss.at_s)]
        if parts:
            moved.append(
                Moved(
                    loss,
                    np.concatenate([one.sessions + first for first, one in parts]),
                    np.concatenate([one.begins_s for _, one in parts]),
                    np.concatenate([one.pauses_s for _, one in parts]),
                    sum(one.num_handed_over for _, one in parts),
                    sum(one.bytes_read for _, one in parts),
                    sum(one.tokens_computed for _, one in parts),
                    max(float(peak_load[loss.at_s]), *(one.peak_load for _, one in parts)),
                )
            )
    return Course(
        moved,
        num_serving,
        np.sum([course.mean_load * course.num_serving for course in courses], axis=0) / num_serving,
        peak_load,
        *(np.sum([getattr(c, name) for c in courses], axis=0) for name in ("waiting", "late_turns", "rebalanced")),
    )


def missed_beats(fleet: Fleet, pauses_s: Floats) -> Ints:
    """Turns of each session that are answered a beat late or later, at most, while it waits."""
    missed: Ints = np.floor(pauses_s / fleet.beat_s + 1e-9).astype(np.int64)
    return missed
