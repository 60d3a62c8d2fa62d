"""How things stand in an engine now: how many sessions and turns there are, whose the pages are, what the tiers hold.

Read on the engine's thread, between two steps, every few seconds: half a millisecond for hundreds of sessions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import numpy as np

from microturn.kv.pool import PagePool
from microturn.kv.stored import Place
from microturn.offload.storage import Storage
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable
from microturn.telemetry.families import Sample
from microturn.telemetry.metrics import Metrics


class Gauges:
    """Brings the metrics of an engine up to date.

    Args:
        metrics: the engine's.
        sessions: those that live.
        running: of these those that have a turn.
        pool: the pages.
        bytes_per_page: what one takes.
        storage: what lies behind the pool.
        clock: seconds, monotonic; the sessions' own.
    """

    def __init__(
        self,
        metrics: Metrics,
        sessions: SessionTable,
        running: Collection[Session],
        pool: PagePool,
        bytes_per_page: int,
        storage: Storage,
        clock: Callable[[], float],
    ) -> None:
        self._metrics = metrics
        self._sessions = sessions
        self._running = running
        self._pool = pool
        self._bytes_per_page = bytes_per_page
        self._storage = storage
        self._clock = clock

    def read(self, *, is_draining: bool) -> dict[Sample, float]:
        """All metrics as of now.

        Args:
            is_draining: whether the engine takes no more turns.
        """
        metrics = self._metrics
        metrics.heartbeat.set(time.time())
        metrics.draining.set(is_draining)
        self._read_sessions()
        self._read_pages()
        self._read_tiers()
        return metrics.samples()

    @property
    def free_bytes(self) -> int:
        """What nothing has of the pool. Beginnings that are kept to be shared would give way, and are not counted."""
        return (self._pool.num_pages - self._pool.num_used) * self._bytes_per_page

    @property
    def deadlines(self) -> tuple[int, int]:
        """How many were met and missed."""
        values = self._metrics.deadlines.values
        return int(values["met",]), int(values["missed",])

    def _read_sessions(self) -> None:
        metrics = self._metrics
        places = Counter((session.state, session.kv_place) for session in self._sessions)
        for values in metrics.sessions.series:
            metrics.sessions.set(places[values[0], values[1]], *values)
        metrics.input_bytes.set(sum(session.context.num_bytes for session in self._sessions))
        metrics.turns_open.set(len(self._running), "running")
        metrics.turns_open.set(sum(len(session.queued) for session in self._running), "queued")
        silent = (session.expires_s for session in self._sessions if session.running is None)
        metrics.reaper_lag.set(max(0.0, self._clock() - min(silent, default=self._clock())))

    def _read_pages(self) -> None:
        num_running, num_living = self._num_pages_of(self._running), self._num_pages_of(self._sessions)
        nums = {
            "free": self._pool.num_pages - self._pool.num_used,
            "running": num_running,
            "parked": num_living - num_running,
            "prefix": self._pool.num_used - num_living,
        }
        for use, num_pages in nums.items():
            self._metrics.pages.set(num_pages, use)

    def _num_pages_of(self, sessions: Iterable[Session]) -> int:
        """The pages that some sessions have, those that they share once."""
        of_each = [ids for session in sessions for ids in session.table.page_ids]
        is_theirs = np.zeros(self._pool.num_pages, np.bool_)
        if of_each:
            is_theirs[np.concatenate(of_each)] = True
        return int(np.count_nonzero(is_theirs))

    def _read_tiers(self) -> None:
        pool, host, disk = self._pool, self._storage.host, self._storage.disk
        brought = {True: 0, False: 0}  # by whether it is in memory
        for image in self._storage.incoming:
            if image.place is not Place.HOST:
                brought[image.place is Place.ARRIVED] += image.num_bytes
        used, capacity = self._metrics.kv_bytes, self._metrics.kv_capacity_bytes
        used.set(pool.num_used * self._bytes_per_page, "device")
        used.set(brought[True] + host.used_bytes, "host")
        used.set(brought[False] + (0 if disk is None else disk.used_bytes), "disk")
        capacity.set(pool.num_pages * self._bytes_per_page, "device")
        capacity.set(host.capacity_bytes, "host")
        capacity.set(0 if disk is None else disk.capacity_bytes, "disk")

        done, metrics = self._storage.counters, self._metrics
        metrics.kv_evictions.set(done.moved_to_host, "host")
        metrics.kv_evictions.set(done.moved_to_disk, "disk")
        metrics.kv_evictions.set(done.dropped, "tokens")
        from_disk, ahead_from_disk = done.restored_from_disk, done.restored_ahead_from_disk
        metrics.kv_restores.set(ahead_from_disk, "disk", "true")
        metrics.kv_restores.set(from_disk - ahead_from_disk, "disk", "false")
        metrics.kv_restores.set(done.restored_ahead - ahead_from_disk, "host", "true")
        metrics.kv_restores.set(done.restored - done.restored_ahead - from_disk + ahead_from_disk, "host", "false")
        metrics.kv_preemptions.set(done.preempted)
        metrics.kv_file_errors.set(done.unreadable_files, "read")
        metrics.kv_file_errors.set(done.failed_writes, "write")
