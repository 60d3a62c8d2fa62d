"""Where Envoy puts streams that name no server, as `deploy/envoy/envoy.yaml` has it.

Of five replicas drawn by chance the one with the fewest streams (the power of choices: M. Mitzenmacher, 2001). Each
edge knows its own streams only. A full replica is not drawn as long as another has room. The slow start of a replica
that has just come is left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# choice_count
_NUM_DRAWN = 5


class Placement:
    """Streams of all edges to all replicas.

    Attributes:
        alive: of each replica, whether it takes streams.

    Args:
        num_edges: Envoys.
        num_replicas: servers.
        capacity: sessions with which one is full.
        random: all chance.
    """

    def __init__(self, num_edges: int, num_replicas: int, capacity: int, random: np.random.Generator) -> None:
        self.alive = np.ones(num_replicas, bool)
        self._streams = np.zeros((num_edges, num_replicas), np.int64)
        self._capacity = capacity
        self._random = random
        # So many are placed by one count: few enough that they hardly ever draw the same replicas.
        self._at_once = max(1, num_replicas // 8)

    def place(self, edges: Ints) -> Ints:
        """Replicas for new streams; each is given by its edge."""
        parts = [
            self._place_at_once(edges[begin : begin + self._at_once]) for begin in range(0, len(edges), self._at_once)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _place_at_once(self, edges: Ints) -> Ints:
        has_room = self.alive & (self.load() < self._capacity)
        places = np.flatnonzero(has_room if has_room.any() else self.alive)
        drawn = self._random.choice(places, (_NUM_DRAWN, len(edges)))
        chosen: Ints = drawn[self._streams[edges, drawn].argmin(axis=0), np.arange(len(edges))]
        np.add.at(self._streams, (edges, chosen), 1)
        return chosen

    def end(self, edges: Ints, replicas: Ints) -> None:
        """Streams that are no more."""
        np.subtract.at(self._streams, (edges, replicas), 1)

    def move(self, edges: Ints, replicas: Ints, targets: Ints) -> None:
        """Streams that go on elsewhere, at the same edges."""
        self.end(edges, replicas)
        np.add.at(self._streams, (edges, targets), 1)

    def emptiest(self, num: int) -> Ints:
        """Replicas for so many more streams, each of which goes where the fewest are, as servers hand them over."""
        places = np.flatnonzero(self.alive)
        load = self.load()[places]
        chosen = np.empty(num, np.int64)
        for number in range(num):
            least = int(load.argmin())
            load[least] += 1
            chosen[number] = places[least]
        return chosen

    def load(self) -> Ints:
        """Streams of each replica."""
        streams: Ints = self._streams.sum(axis=0)
        return streams
