"""KV outside the pool: in host memory, from there on disk, or still in the file that a session came from. Decides which
copy is where; knows no sessions.

Copies go on from host memory to the disk, the least recently used first, as soon as more than a share of the host's
bytes is taken, one at a time. Where there is no disk, or it is full, the ones used longest ago are lost: who owned them
computes them again. Belongs to the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from microturn.kv_image import KVImage
from microturn.page_table import TableState
from microturn.tiers.counters import TierCounters
from microturn.tiers.disk_store import DiskStore
from microturn.tiers.host_store import HostStore
from microturn.tiers.incoming import IncomingFiles, KVSource
from microturn.tiers.stored_kv import Place, StoredImage

log = logging.getLogger(__name__)

# What host memory keeps of its capacity before copies go on to the disk: the rest is for those that come meanwhile.
_HOST_SHARE = 0.75

# A disk that others have filled is tried again after this time.
_DISK_PAUSE_S = 60.0


class Storage:
    """Copies of KV in host memory and in files.

    Attributes:
        host: those in memory.
        disk: those in files of ours; None where there is no such tier.
        incoming: those that sessions have brought along.
        counters: what has been done.

    Args:
        host_tier_bytes: what host memory keeps; 0 is nothing, but for what is on its way to the disk.
        max_image_bytes: the largest copy there can be: that much memory there is for the way to the disk.
        image_bytes: what a copy of so many pages takes in host memory.
        disk: see above.
        incoming: see above.
        counters: see above.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        host_tier_bytes: int,
        max_image_bytes: int,
        image_bytes: Callable[[int], int],
        disk: DiskStore | None,
        incoming: IncomingFiles,
        counters: TierCounters,
        clock: Callable[[], float],
    ) -> None:
        self.host = HostStore(host_tier_bytes if disk is None else max(host_tier_bytes, max_image_bytes))
        self.disk = disk
        self.incoming = incoming
        self.counters = counters
        self._image_bytes = image_bytes
        self._clock = clock
        self._kept_bytes = int(_HOST_SHARE * host_tier_bytes)
        self._writing: StoredImage | None = None
        self._step = 0
        self._disk_was_full_s = -_DISK_PAUSE_S

    @property
    def is_there(self) -> bool:
        """Whether anything can be kept at all."""
        return self.host.capacity_bytes > 0

    def __iter__(self) -> Iterator[StoredImage]:
        return iter(list(dict.fromkeys([*self.host, *(self.disk or ()), *self.incoming])))

    def begin_step(self) -> None:
        """Turns that wait for a copy ask for it in every step; who has not done so since the last one waits no more."""
        self._step += 1
        if self.disk is None and not self.host.has_room(0):
            self.make_room(0)  # more came for a turn than is kept, and the turn wants it no more

    # ---- from the pool -------------------------------------------------------------------------------------------

    def has_room(self, num_bytes: int) -> bool:
        """Whether a copy can be added, for who can wait: while others can go on to the disk, none is lost."""
        if self.host.has_room(num_bytes):
            return True
        self._write_one()
        return self.host.has_room(num_bytes) or (self._writing is None and self.make_room(num_bytes))

    def make_room(self, num_bytes: int) -> bool:
        """Makes room for a copy at once, if need be by losing others; False when it is too large."""
        return self._lose_oldest(self.host, Place.HOST, num_bytes)

    def add(self, pages: KVImage, state: TableState) -> StoredImage:
        """Keeps a copy for which there is room."""
        image = StoredImage(state, self._image_bytes(state.num_pages), self._discard, pages)
        self.host.add(image)
        self.counters.moved_to_host += 1
        self._write_some()
        return image

    def bring(self, source: KVSource) -> StoredImage:
        """Knows of a copy that a session has brought along, in a file; it is read when a turn wants it."""
        num_bytes = self._image_bytes(source.state.num_pages)
        image = StoredImage(source.state, num_bytes, self._discard, None, Place.DISK)
        self.incoming.add(image, source)
        return image

    # ---- back towards the pool -----------------------------------------------------------------------------------

    def fetch(self, image: StoredImage, *, is_urgent: bool) -> bool:
        """Whether a copy is in memory, or lost; if it is neither, it is fetched.

        Args:
            image: the copy.
            is_urgent: whether a turn waits for it. Others give way.
        """
        if is_urgent:
            image.wanted_in = self._step
        if image.place is Place.DISK and self._may_come(image, is_urgent=is_urgent):
            image.place = Place.READING
            self.host.add(image)
            self._files_of(image).read(image, partial(self._has_read, image), is_urgent=is_urgent)
        elif image.place is Place.READING and is_urgent:
            self._files_of(image).hurry(image)
        return image.place not in (Place.DISK, Place.READING)

    def reader(self, image: StoredImage) -> Callable[[], KVImage]:
        """What reads a copy that is not lost, in any thread, and leaves it where it is.

        It raises why the copy cannot be had: a turn may have taken it in the meantime.
        """
        pages = image.pages
        return self._files_of(image).reader(image) if pages is None else lambda: pages

    def close(self) -> None:
        """Ends the work on files and removes them; nothing that was kept can be had any more."""
        if self.disk is not None:
            self.disk.close()
        self.incoming.close()

    def check_integrity(self) -> None:
        """Asserts that every copy is where it says, and that bytes are counted right."""
        in_files = {*(self.disk or ()), *(image for image in self.incoming if image.place is not Place.HOST)}
        for image in self:
            assert (image.pages is not None) == (image.place in (Place.HOST, Place.WRITING)), image.place
            assert (image in in_files) == (image.place in (Place.WRITING, Place.DISK, Place.READING)), image.place
            assert image.num_users > 0 or image.place in (Place.WRITING, Place.READING), "kept for nobody"
        assert all(image.place is not Place.DISK for image in self.host)
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()

    # ---- between host memory and disk ----------------------------------------------------------------------------

    def _may_come(self, image: StoredImage, *, is_urgent: bool) -> bool:
        """Whether there is memory for a file; for a turn one at a time comes whatever the room."""
        if self.host.has_room(image.num_bytes):
            return True
        return is_urgent and not any(other.place is Place.READING for other in self.host)

    def _write_some(self) -> None:
        """Makes room in memory before it is full."""
        if self.host.used_bytes > self._kept_bytes:
            self._write_one()

    def _write_one(self) -> None:
        """Writes the least recently used copy, if there is where to and no other is being written."""
        if self.disk is None or self._writing is not None:
            return
        if self._clock() >= self._disk_was_full_s + _DISK_PAUSE_S:
            self.disk.capacity_bytes = self.disk.max_bytes
        image = self._oldest(self.host, Place.HOST)
        while image is not None and image in self.incoming:
            self._put_back(image)
            image = self._oldest(self.host, Place.HOST)
        if image is None or not self._lose_oldest(self.disk, Place.DISK, image.num_bytes):
            return
        image.place = Place.WRITING
        self._writing = image
        self.disk.write(image, partial(self._has_written, image))

    def _has_written(self, image: StoredImage, error: Exception | None) -> None:
        assert self.disk is not None
        self._writing = None
        if error is not None:
            # Less fits than was thought: for a while the files used longest ago give way sooner.
            self.disk.capacity_bytes = self.disk.used_bytes
            self._disk_was_full_s = self._clock()
            self.counters.failed_writes += 1
            log.error("the disk tier holds %d bytes and takes no more: %s", self.disk.used_bytes, error)
            image.place = Place.HOST
        else:
            image.place, image.pages = Place.DISK, None
            self.host.remove(image)
            self.counters.moved_to_disk += 1
        if not image.num_users:
            self._discard(image)
        self._write_some()

    def _has_read(self, image: StoredImage, pages: KVImage | None, error: Exception | None) -> None:
        files = self._files_of(image)
        if pages is None or files is not self.incoming:  # where memory is short, what was brought along is read again
            files.remove(image)
        if pages is None:
            self.counters.unreadable_files += 1
            log.error("KV is computed again: its file cannot be used: %s", error)
            self.host.remove(image)
            image.place = Place.LOST
            return
        self.counters.read_from_disk += 1
        image.place, image.pages, image.was_in_file = Place.HOST, pages, True
        if not image.num_users:
            self._discard(image)

    # ---- the end of a copy ---------------------------------------------------------------------------------------

    def _lose_oldest(self, store: HostStore | DiskStore, place: Place, num_bytes: int) -> bool:
        """Makes room in a store, by losing copies that rest there if need be; False when it cannot be made."""
        if num_bytes > store.capacity_bytes:
            return False
        while not store.has_room(num_bytes):
            image = self._oldest(store, place)
            if image is None:
                return False
            if image in self.incoming and place is Place.HOST:
                self._put_back(image)
            else:
                self.counters.dropped += image.num_users
                self._discard(image)
        return True

    def _oldest(self, store: HostStore | DiskStore, place: Place) -> StoredImage | None:
        """The least recently used copy that rests in a store, and that no turn is waiting for."""
        resting = (image for image in store if image.place is place)
        return next((image for image in resting if image.wanted_in < self._step - 1), None)

    def _put_back(self, image: StoredImage) -> None:
        """Leaves a copy that was brought along in its file alone."""
        self.host.remove(image)
        image.place, image.pages = Place.DISK, None

    def _discard(self, image: StoredImage) -> None:
        """Removes a copy; one that is on its way between memory and disk when it has arrived."""
        if image.place is Place.HOST:
            self.host.remove(image)
            if image in self.incoming:
                self.incoming.remove(image)
        elif image.place is Place.DISK:
            self._files_of(image).remove(image)
        else:
            return
        image.place, image.pages = Place.LOST, None

    def _files_of(self, image: StoredImage) -> DiskStore | IncomingFiles:
        """Whose file a copy is in."""
        if image in self.incoming:
            return self.incoming
        assert self.disk is not None
        return self.disk
