"""The host tier: KV in host memory, its total bytes and its LRU order.

The bytes of a copy are reserved from the moment it is expected.
"""

from __future__ import annotations

from collections.abc import Iterator

from microturn.kv.stored import StoredImage


class HostStore:
    """Copies in host memory, least recently used first.

    Attributes:
        used_bytes: of all copies.

    Args:
        capacity_bytes: limit of `used_bytes`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._images: dict[StoredImage, None] = {}

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[StoredImage]:
        return iter(self._images)

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.capacity_bytes

    def add(self, image: StoredImage) -> None:
        assert image not in self._images
        self._images[image] = None
        self.used_bytes += image.num_bytes

    def remove(self, image: StoredImage) -> None:
        del self._images[image]
        self.used_bytes -= image.num_bytes

    def check_integrity(self) -> None:
        """Asserts that the byte counts are right."""
        assert self.used_bytes == sum(image.num_bytes for image in self._images)
