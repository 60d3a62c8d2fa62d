"""Opens the storage tiers from the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from microturn.errors import InvalidArgument
from microturn.kv.tensors import KVTensors
from microturn.offload.counters import TierCounters
from microturn.offload.disk_store import DiskStore
from microturn.offload.incoming import IncomingFiles
from microturn.offload.storage import Storage
from microturn.settings import Settings


def open_storage(
    settings: Settings,
    kv: KVTensors,
    *,
    max_image_pages: int,
    model_fingerprint: str,
    clock: Callable[[], float],
    post: Callable[[Callable[[], None]], None],
) -> Storage:
    """Opens the tiers that the settings configure, empty.

    Args:
        settings: of the engine.
        kv: the cache whose pages are copied.
        max_image_pages: pages of the largest possible copy.
        model_fingerprint: written into files.
        clock: seconds, monotonic.
        post: schedules a call on the engine thread.

    Raises:
        InvalidArgument: the disk tier's directory cannot be used.
    """
    disk = None
    if settings.disk_tier_dir:
        try:
            disk = DiskStore(
                Path(settings.disk_tier_dir), settings.disk_tier_bytes, model_fingerprint, kv.new_image, post
            )
        except OSError as error:
            raise InvalidArgument(
                f"setting 'disk_tier_dir' cannot be used: {error.strerror}: {error.filename}"
            ) from error
    incoming = IncomingFiles(kv.new_image, post)
    storage = Storage(
        settings.host_tier_bytes,
        kv.image_bytes(max_image_pages),
        kv.image_bytes,
        disk,
        incoming,
        TierCounters(),
        clock,
    )
    kv.reserve_host_memory(storage.host.capacity_bytes)
    return storage
