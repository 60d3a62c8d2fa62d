"""What the tiers have done since the start. Plain numbers, changed by the engine's thread alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierCounters:
    """How often.

    Attributes:
        moved_to_host: KV left the pool for host memory.
        moved_to_disk: it went on into a file.
        read_from_disk: a file was read and found intact.
        restored: KV came back into the pool.
        restored_ahead: of these, before the turn came.
        restored_from_disk: of those that came back, such as had been read from a file.
        restored_ahead_from_disk: of these, before the turn came.
        preempted: a turn lost its pages to a more urgent one.
        dropped: KV was given up for lack of room, and is computed again when its session goes on.
        unreadable_files: files that were damaged, missing or of another model; theirs is computed again too.
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
