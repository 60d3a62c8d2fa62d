"""Event counts of the tiers since the start, changed only by the engine thread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierCounters:
    """Event counts.

    Attributes:
        moved_to_host: KV was offloaded from the pool to host memory.
        moved_to_disk: KV went on from host memory to a file.
        read_from_disk: a file was read intact.
        restored: KV was loaded into the pool.
        restored_ahead: of these, before the turn arrived.
        restored_from_disk: of those restored, read from a file.
        restored_ahead_from_disk: of these, before the turn arrived.
        preempted: a turn lost its pages to a more urgent turn.
        dropped: KV was dropped for lack of room, and is recomputed when its session continues.
        unreadable_files: files that were damaged, missing, of another model or refused for long; it is recomputed too.
        failed_writes: files that could not be written, most often because the disk was full.
    """

    moved_to_host: int = 0
    moved_to_disk: int = 0
    read_from_disk: int = 0
    restored: int = 0
    restored_ahead: int = 0
    restored_from_disk: int = 0
    restored_ahead_from_disk: int = 0
    preempted: int = 0
    dropped: int = 0
    unreadable_files: int = 0
    failed_writes: int = 0
