"""How sessions move: restored by a look-up and from tokens or volume, handed over by a drain, evened out by servers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from load_tests.fleet.fleet import Fleet, Loss
from load_tests.fleet.placement import Ints, Placement
from microturn.admin.peers import SETTLED_S

Floats = NDArray[np.float64]

# As `rebalancer.py` has it: servers move sessions while they have more than this multiple of their share.
_TOLERANCE = 1.05


def restore(
    fleet: Fleet,
    loss: Loss,
    arrival_s: float,
    targets: Ints,
    load: Ints,
    num_live: int,
    busy_s: Floats,
    restored_from: str,
    random: np.random.Generator,
) -> Floats:
    """When each session is served again at its target; replicas are busy until they have restored theirs.

    A target asks all other replicas of the cell for each of its sessions, and is asked by them. What it has not found
    it restores, one after the other, while it looks for the next.

    Args:
        fleet: what is assumed.
        loss: that it was.
        arrival_s: when the sessions' clients are at their targets.
        targets: of each session.
        load: sessions of each replica.
        num_live: replicas that there are to ask.
        busy_s: until when each replica restores; changed.
        restored_from: `tokens` or `volume`.
        random: all chance.
    """
    if not len(targets):
        return np.zeros(0)
    if restored_from == "tokens":
        spare = np.maximum(1 - load / fleet.capacity, fleet.least_share)
        restoring_s = fleet.context / (fleet.prefill_tokens_s * spare)
    else:
        share = min(fleet.network_bytes_s, fleet.volume_bytes_s / len(np.unique(targets)))
        restoring_s = np.full(len(load), fleet.session_bytes / share)
    if loss.is_silent:
        arrival_s += fleet.forget_s
    # Each replica's sessions in a random order.
    order = random.permutation(len(targets))
    order = order[np.argsort(targets[order], kind="stable")]
    queues, firsts, counts = np.unique(targets[order], return_index=True, return_counts=True)
    numbers = np.arange(len(order)) - np.repeat(firsts, counts) + 1
    asked = np.repeat(len(targets) / counts, counts)  # by all, for each session of this replica's own
    finding_s = (num_live - 1) * fleet.ask_s + asked * fleet.answer_s
    each_s = restoring_s[targets[order]]
    start_s = np.maximum(arrival_s, busy_s)[targets[order]]
    ready_s = np.empty(len(targets))
    # Whichever of the two is slower keeps the other waiting.
    ready_s[order] = start_s + np.maximum(finding_s + numbers * each_s, numbers * finding_s + each_s)
    busy_s[queues] = ready_s[order][firsts + counts - 1]
    return ready_s


def handed_over_s(fleet: Fleet, num: int, random: np.random.Generator) -> Floats:
    """What turns take whose sessions are handed over meanwhile, as it has been measured: p50 and the longest."""
    known = [fleet.held_s, fleet.handed_turn_s, fleet.handed_turn_most_s]
    drawn: Floats = np.interp(random.random(num), [0.0, 0.5, 1.0], known)
    return drawn


class Rebalancing:
    """What servers move to emptier ones, each by itself, as `rebalancer.py` has it.

    The emptiest is the same for all, and what is on its way there is not counted yet: so one replica of a cell receives
    at a time, as its network takes it.

    Args:
        fleet: what is assumed.
        random: all chance.
    """

    def __init__(self, fleet: Fleet, random: np.random.Generator) -> None:
        self._random = random
        self._moves_s = fleet.moves_per_minute / 60
        self._most = fleet.network_bytes_s / fleet.session_bytes
        self._due = 0.0

    def move(self, placement: Placement, age_s: Floats, owners: Ints, rests: NDArray[np.bool_]) -> tuple[Ints, int]:
        """What goes within a second.

        Args:
            placement: all streams.
            age_s: since when each replica takes sessions.
            owners: of each session.
            rests: whether a session can be moved.

        Returns:
            The sessions, of a replica each, and the replica where they go.
        """
        nothing = np.zeros(0, np.int64), 0
        places = np.flatnonzero(placement.alive & (age_s >= SETTLED_S))
        if not self._moves_s or not len(places):
            return nothing
        load = placement.load()
        mean = load[places].mean()
        target = int(places[load[places].argmin()])
        least = max(2, math.floor(max(_TOLERANCE * mean, mean + 0.5)) + 1, load[target] + 2)
        givers = places[load[places] >= least]
        self._due = min(self._due, 1.0) + min(len(givers) * self._moves_s, self._most)
        num = min(int(self._due), len(givers))
        if not num:
            return nothing
        self._due -= num
        is_giver = np.zeros(len(load), bool)
        is_giver[self._random.choice(givers, num, replace=False)] = True
        there = self._random.permutation(np.flatnonzero(is_giver[owners] & rests))
        moving: Ints = there[np.unique(owners[there], return_index=True)[1]]
        return moving, target
