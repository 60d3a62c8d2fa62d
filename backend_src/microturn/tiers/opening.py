"""From settings to what lies behind the pool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from microturn.errors import InvalidArgument
from microturn.kv_tensors import KVTensors
from microturn.settings import Settings
from microturn.tiers.counters import TierCounters
from microturn.tiers.disk_store import DiskStore
from microturn.tiers.incoming import IncomingFiles
from microturn.tiers.storage import Storage


def open_storage(
    settings: Settings,
    kv: KVTensors,
    *,
    max_image_pages: int,
    model_fingerprint: str,
    clock: Callable[[], float],
    post: Callable[[Callable[[], None]], None],
) -> Storage:
    """The tiers that the settings ask for, empty.

    Args:
        settings: see above.
        kv: the pages whose copies are kept.
        max_image_pages: pages of the largest copy there can be.
        model_fingerprint: says whose KV it is.
        clock: seconds, monotonic.
        post: hands what is to be called over to the engine's thread.

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
