"""How sessions move: restored by a look-up and from tokens or volume, handed over by a drain, evened out by servers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from load_tests.fleet.fleet import Fleet, Loss
from load_tests.fleet.placement import Ints, Placement
from microturn.admin.peers import SETTLED_S
from microturn.admin.rebalancer import NUM_ASKED, PAUSE_S, TOLERANCE

Floats = NDArray[np.float64]


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
    """What servers move to emptier ones, as `rebalancer.py` has it. Each receives as its network takes it.

    Args:
        fleet: what is assumed.
        num_replicas: of the cell.
        random: all chance.
    """

    def __init__(self, fleet: Fleet, num_replicas: int, random: np.random.Generator) -> None:
        self._random = random
        self._moves_per_minute = fleet.moves_per_minute
        self._most = fleet.network_bytes_s / fleet.session_bytes
        self._receives = np.zeros(num_replicas)  # so many sessions by now
        self._looks_s = np.linspace(0.0, PAUSE_S, num_replicas)  # when each looks at others again

    def move(
        self, now_s: float, placement: Placement, age_s: Floats, owners: Ints, rests: NDArray[np.bool_]
    ) -> tuple[Ints, Ints]:
        """What goes within a second.

        Args:
            now_s: since the start.
            placement: all streams.
            age_s: since when each replica takes sessions.
            owners: of each session.
            rests: whether a session can be moved.

        Returns:
            The sessions, of a replica each, and the replicas where they go.
        """
        nothing = np.zeros(0, np.int64)
        places = np.flatnonzero(placement.alive & (age_s >= SETTLED_S))
        if not self._moves_per_minute or len(places) < 2:
            return nothing, nothing
        self._receives = np.minimum(self._receives, 1.0) + self._most
        load = placement.load()
        looking = self._random.permutation(places[self._looks_s[places] < now_s + 1.0])
        self._looks_s[looking] += PAUSE_S
        np.maximum(self._looks_s, now_s, out=self._looks_s)  # of those that were lost
        asked = np.sort(self._random.choice(places, (NUM_ASKED, len(looking))), axis=0)
        if len(places) <= NUM_ASKED:
            asked = np.repeat(places[:, None], len(looking), axis=1)
        targets = asked[load[asked].argmin(axis=0), np.arange(len(looking))]
        enough = np.ceil(np.minimum(load[looking] - 1, (1 - TOLERANCE) * load[looking]))
        gives = (load[targets] < enough) & (load[looking] >= load[asked].mean(axis=0))
        target_of = np.full(len(load), -1)
        for giver, target, most in zip(looking[gives], targets[gives], enough[gives], strict=True):
            if load[target] < most and self._receives[target] >= 1:  # who receives has the last word
                load[target] += 1
                self._receives[target] -= 1
                target_of[giver] = target
        there = self._random.permutation(np.flatnonzero((target_of[owners] >= 0) & rests))
        moving: Ints = there[np.unique(owners[there], return_index=True)[1]]
        self._looks_s[owners[moving]] += 60 / self._moves_per_minute - PAUSE_S
        return moving, target_of[owners[moving]]
