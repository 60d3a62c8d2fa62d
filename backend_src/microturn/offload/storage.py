"""Offloaded KV: in host memory, on disk, or as a restored session brought it along. Decides which copy is where.

Once more than a share of the host tier is used, copies are written to disk one at a time, least recently used first.
Without a disk tier, or when it is full, the least recently used copies are lost and their sessions recompute them. All
methods run on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from microturn.kv.image import KVImage
from microturn.kv.stored import Place, StoredImage
from microturn.kv.table_state import TableState
from microturn.offload.counters import TierCounters
from microturn.offload.disk_store import DiskStore
from microturn.offload.failed_reads import FailedReads
from microturn.offload.file_thread import Job, Outcome, Priority
from microturn.offload.host_store import HostStore
from microturn.offload.incoming import IncomingFiles, KVSource

log = logging.getLogger(__name__)

# Share of the host tier above which copies are written to disk: the rest is for copies that arrive meanwhile.
_HOST_SHARE = 0.75

# Copies of the largest size whose files are read at once for turns without room in the host tier: with one that hangs
# there is memory for others.
_READ_AT_ONCE = 2


class Storage:
    """Copies of KV in host memory and in files.

    Attributes:
        host: copies in memory.
        disk: copies in files of this process; None without a disk tier.
        incoming: copies that restored sessions brought along.
        counters: event counts.
        failed: copies whose files could not be read for the moment.

    Args:
        host_tier_bytes: capacity of the host tier; 0 keeps nothing but copies on their way to the disk.
        max_image_bytes: size of the largest possible copy; that much memory is kept for the way to the disk, and twice
            as much may be taken on the way back for turns.
        image_bytes: bytes of host memory that an image of n pages takes.
        disk: as above.
        incoming: as above.
        counters: as above.
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
        self._most_read_bytes = _READ_AT_ONCE * max_image_bytes
        self._kept_bytes = int(_HOST_SHARE * host_tier_bytes)
        self._writing: StoredImage | None = None
        self._reading: dict[StoredImage, Job] = {}
        self.failed = FailedReads(clock)
        self._step = 0

    @property
    def is_there(self) -> bool:
        """Whether any tier exists."""
        return self.host.capacity_bytes > 0

    def __iter__(self) -> Iterator[StoredImage]:
        return iter(list(dict.fromkeys([*self.host, *(self.disk or ()), *self.incoming])))

    def begin_step(self) -> None:
        """Begins a step: a copy that no turn asked for in the last step is no longer waited for."""
        self._step += 1
        if self.disk is None and not self.host.has_room(0):
            self.make_room(0)  # a copy above capacity was read for a turn that no longer waits

    # ---- from the pool -------------------------------------------------------------------------------------------

    def has_room(self, num_bytes: int) -> bool:
        """Whether a copy can be added without losing another one while copies can still be written to disk."""
        if self.host.has_room(num_bytes):
            return True
        self._write_one()
        return self.host.has_room(num_bytes) or (self._writing is None and self.make_room(num_bytes))

    def make_room(self, num_bytes: int) -> bool:
        """Makes room for a copy at once, if necessary by losing others; returns False if it is too large."""
        return self._lose_oldest(self.host, Place.HOST, num_bytes)

    def add(self, pages: KVImage, state: TableState) -> StoredImage:
        """Adds a copy for which there is room."""
        image = StoredImage(state, self._image_bytes(state.num_pages), self._discard, pages)
        self.host.add(image)
        self.counters.moved_to_host += 1
        self._write_some()
        return image

    def bring(self, source: KVSource) -> StoredImage:
        """Adds a copy that a restored session brings along; one in a file is read when a turn needs it."""
        num_bytes, pages = self._image_bytes(source.state.num_pages), source.pages
        place = Place.DISK if pages is None else Place.ARRIVED
        image = StoredImage(source.state, num_bytes, self._discard, pages, place)
        self.incoming.add(image, source)
        return image

    # ---- to the pool ---------------------------------------------------------------------------------------------

    def fetch(self, image: StoredImage, *, is_urgent: bool, can_be_recomputed: bool = True) -> bool:
        """Returns whether a copy is in memory or lost; otherwise begins to read it.

        Args:
            image: the copy.
            is_urgent: whether a turn waits for it. Other copies are evicted for it.
            can_be_recomputed: whether its session has all tokens. Otherwise a file that cannot be read is tried for
                longer before the copy is lost.
        """
        if is_urgent:
            image.wanted_in = self._step
        if image.place is Place.DISK and self.failed.rests(image):
            if is_urgent and self.failed.is_over(image, can_be_recomputed=can_be_recomputed):
                self._give_up(image, "it could not be read again and again")
        elif image.place is Place.DISK and self._may_come(image, is_urgent=is_urgent):
            image.place = Place.READING
            self.host.add(image)
            files, priority = self._files_of(image), Priority.TURN if is_urgent else Priority.AHEAD
            self._reading[image] = files.threads.submit(files.reader(image), partial(self._has_read, image), priority)
        elif image.place is Place.READING and is_urgent:
            self._files_of(image).threads.hurry(self._reading[image])
        return image.place not in (Place.DISK, Place.READING)

    def reader(self, image: StoredImage) -> Callable[[], KVImage]:
        """A function that reads a copy that is not lost, in any thread, and leaves it in place.

        The function raises if the copy is gone: a turn may have loaded it in the meantime.
        """
        pages = image.pages
        return self._files_of(image).reader(image) if pages is None else lambda: pages

    def close(self) -> None:
        """Ends the file threads and removes the files; no copy is available afterwards."""
        if self.disk is not None:
            self.disk.close()
        self.incoming.close()

    def check_integrity(self) -> None:
        """Asserts that every copy is where its place says, and that the byte counts are right."""
        in_memory = (Place.ARRIVED, Place.HOST)
        in_files = {*(self.disk or ()), *(image for image in self.incoming if image.place not in in_memory)}
        for image in self:
            assert (image.pages is not None) == (image.place in (*in_memory, Place.WRITING)), image.place
            assert image.place is not Place.ARRIVED or image in self.incoming, image.place
            assert (image in in_files) == (image.place in (Place.WRITING, Place.DISK, Place.READING)), image.place
            assert image.num_users > 0 or image.place in (Place.WRITING, Place.READING), "kept without users"
        assert all(image.place is not Place.DISK for image in self.host)
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()

    # ---- between host memory and disk ----------------------------------------------------------------------------

    def _may_come(self, image: StoredImage, *, is_urgent: bool) -> bool:
        """Whether there is memory to read a file; for waiting turns there is some in any case."""
        if self.host.has_room(image.num_bytes):
            return True
        num_bytes = sum(other.num_bytes for other in self._reading) + image.num_bytes
        return is_urgent and (not self._reading or num_bytes <= self._most_read_bytes)

    def _write_some(self) -> None:
        """Writes a copy to disk before the host tier is full."""
        if self.host.used_bytes > self._kept_bytes:
            self._write_one()

    def _write_one(self) -> None:
        """Writes the least recently used copy if there is a disk tier and no other copy is being written."""
        if self.disk is None or self._writing is not None or not self.disk.takes_files(self._clock()):
            return
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
            self.disk.note_failure(error, self._clock())
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

    def _has_read(self, image: StoredImage, outcome: Outcome[KVImage]) -> None:
        files, pages = self._files_of(image), outcome.value
        del self._reading[image]
        if pages is not None:
            if files is not self.incoming:  # without memory, a copy in a snapshot is read again later
                files.remove(image)
            self.failed.forget(image)
            self.counters.read_from_disk += 1
            image.place, image.pages, image.was_in_file = Place.HOST, pages, True
        else:
            self.host.remove(image)
            image.place = Place.DISK
            if not self.failed.may_pass(outcome.error):
                self._give_up(image, outcome.error)
            elif self.failed.note(image):
                log.warning("KV cannot be read for the moment: %s", outcome.error)
        if not image.num_users:
            self._discard(image)

    # ---- the end of a copy ---------------------------------------------------------------------------------------

    def _give_up(self, image: StoredImage, reason: object) -> None:
        """Loses a copy whose file cannot be used."""
        log.error("KV is recomputed: its file cannot be used: %s", reason)
        self.counters.unreadable_files += 1
        self._discard(image)

    def _lose_oldest(self, store: HostStore | DiskStore, place: Place, num_bytes: int) -> bool:
        """Makes room in a store, if necessary by losing idle copies; returns False if that is not enough."""
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
        """The least recently used idle copy in a store for which no turn waits."""
        resting = (image for image in store if image.place is place)
        return next((image for image in resting if image.wanted_in < self._step - 1), None)

    def _put_back(self, image: StoredImage) -> None:
        """Frees the memory of a copy that is still in its snapshot."""
        self.host.remove(image)
        image.place, image.pages = Place.DISK, None

    def _discard(self, image: StoredImage) -> None:
        """Removes a copy; one that is being read or written is removed afterwards."""
        if image.place is Place.HOST:
            self.host.remove(image)
            if image in self.incoming:
                self.incoming.remove(image)
        elif image.place in (Place.DISK, Place.ARRIVED):
            self._files_of(image).remove(image)
        else:
            return
        self.failed.forget(image)
        image.place, image.pages = Place.LOST, None

    def _files_of(self, image: StoredImage) -> DiskStore | IncomingFiles:
        """The store whose file holds a copy."""
        if image in self.incoming:
            return self.incoming
        assert self.disk is not None
        return self.disk
