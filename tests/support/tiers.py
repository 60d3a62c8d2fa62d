"""Tiers without an engine, over a pool whose pages hold anything."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from microturn.engine.scheduler import Scheduler
from microturn.engine.step_time import StepTimeModel
from microturn.kv.image import KVImage
from microturn.kv.layer_groups import LayerShape
from microturn.kv.pool import PagePool
from microturn.kv.prefix_cache import PrefixCache
from microturn.kv.stored import Place
from microturn.kv.tensors import KVTensors
from microturn.offload.counters import TierCounters
from microturn.offload.disk_store import DiskStore
from microturn.offload.file_thread import NUM_READERS, FileThreads, Priority
from microturn.offload.incoming import IncomingFiles
from microturn.offload.storage import Storage
from microturn.offload.tiers import Tiers
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId
from support.by_hand import FilesByHand
from support.clock import Clock
from support.driver import Driver
from support.late_copies import NewCopier
from support.sessions import make_session, make_table

MODEL = "a model"
MOVING = (Place.WRITING, Place.READING)


def make_kv(
    num_pages: int, *, page_size: int = 4, dtype: torch.dtype = torch.float32, new_copier: NewCopier = None
) -> KVTensors:
    """Two layers of different shapes, filled with bits of any kind."""
    layers = [LayerShape(2, 3), LayerShape(1, 5)]
    kv = KVTensors(layers, num_pages, page_size, dtype=dtype, new_copier=new_copier)
    generator = torch.Generator().manual_seed(num_pages)
    for tensor in kv.tensors:
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8))
    return kv


def bits_of(kv: KVTensors, pages: list[int]) -> bytes:
    """All that stands in some pages."""
    return b"".join(tensor[pages].contiguous().view(torch.uint8).cpu().numpy().tobytes() for tensor in kv.tensors)


def contents_of(image: KVImage) -> bytes:
    """All that stands in an image."""
    return b"".join(image.contents())


def tensors_of(image: KVImage) -> list[torch.Tensor]:
    """The same, part by part: [num_pages, *shape] each."""
    image.store_transfer.wait()
    return [torch.cat(blocks) for blocks in zip(*image.blocks, strict=True)]


class Posts:
    """What the file thread hands over, done by the test's thread."""

    def __init__(self) -> None:
        self._posts: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.post = self._posts.put

    def take(self) -> None:
        """Does what has been posted."""
        while not self._posts.empty():
            self._posts.get()()


def wait_for_files(threads: FileThreads) -> None:
    """Waits until all that was submitted is done and posted: until all threads have nothing to do but meet."""
    if isinstance(threads, FilesByHand):
        threads.do_all()
        return
    all_met = threading.Barrier(NUM_READERS + 2)
    for priority in [Priority.AHEAD] * NUM_READERS + [Priority.LATER]:
        threads.submit(partial(all_met.wait, 30), lambda _: None, priority)
    all_met.wait(30)


class StorageDriver:
    """A storage whose files are waited for.

    Args:
        host_bytes: see `Storage`.
        disk_dir: where the files are; None is no disk.
        disk_bytes: see `DiskStore`.
        max_image_bytes: see `Storage`.
        kv: whose pages are kept.
    """

    def __init__(
        self,
        host_bytes: int,
        disk_dir: Path | None = None,
        *,
        disk_bytes: int = 0,
        max_image_bytes: int = 0,
        kv: KVTensors | None = None,
    ) -> None:
        self.kv = kv or make_kv(16)
        self._posts = Posts()
        self.take_posts = self._posts.take
        self.disk = (
            None if disk_dir is None else DiskStore(disk_dir, disk_bytes, MODEL, self.kv.new_image, self._posts.post)
        )
        self.incoming = IncomingFiles(self.kv.new_image, self._posts.post)
        self.counters = TierCounters()
        self.clock = Clock()
        self.storage = Storage(
            host_bytes, max_image_bytes, self.kv.image_bytes, self.disk, self.incoming, self.counters, self.clock
        )

    def settle(self) -> None:
        """Waits until no file is being read, written or removed any more."""
        _settle(self.storage, self._posts.take)
        self.storage.check_integrity()


class TiersDriver(StorageDriver):
    """Tiers over a pool and a table of sessions."""

    def __init__(
        self,
        pool: PagePool,
        host_bytes: int = 0,
        disk_dir: Path | None = None,
        *,
        new_copier: NewCopier = None,
        **kwargs: int,
    ) -> None:
        kv = make_kv(pool.num_pages, page_size=pool.page_size, new_copier=new_copier)
        super().__init__(host_bytes, disk_dir, kv=kv, **kwargs)
        self.pool = pool
        self.sessions = make_table()
        self.prefixes = PrefixCache(pool)
        self.tiers = Tiers(pool, self.kv, self.sessions, self.storage, self.clock)

    def park(self, session: Session) -> bytes:
        """Adds a session that has no turn; says what stands in its pages."""
        self.sessions.add(session)
        self.sessions.park(session)
        return bits_of(self.kv, session.table.pages)

    def new_parked(self, session_id: int, kv_len: int, *, beat_s: float | None = None) -> Session:
        """A session that has no turn; with a beat, its next one is due so much later."""
        session = make_session(self.pool, session_id, context_len=kv_len + 1, kv_len=kv_len)
        for number in range(4 if beat_s is not None else 0):
            session.beat.note(self.clock() - (3 - number) * (beat_s or 0))
        self.park(session)
        return session

    def schedule(self, *sessions: Session) -> list[SessionId]:
        """One step with turns: whose rows are computed."""
        self.tiers.begin_step()
        rows = Scheduler(64, self.tiers, StepTimeModel(), self.clock).schedule(sessions, with_others=True)
        self.tiers.end_step()
        self.check_integrity()
        return [row.session.id for row in rows]

    def step(self) -> bool:
        """One step without turns: whether more could be copied at once."""
        self.tiers.begin_step()
        has_more = self.tiers.end_step()
        self.check_integrity()
        return has_more

    def check_integrity(self) -> None:
        tables = [session.table.pages for session in self.sessions]
        self.pool.check_integrity(tables, self.prefixes.pages)
        self.tiers.check_integrity()


def settle(driver: Driver) -> None:
    """Waits until no file of the engine's is being read, written or removed any more."""
    _settle(driver.engine._tiers.storage, lambda: driver.engine._take_posts(block=False))


def _settle(storage: Storage, take_posts: Callable[[], None]) -> None:
    def wait_for_threads() -> None:
        # The threads of what sessions bring along begin with the first such file, which a post may bring.
        for threads in (storage.incoming._started, None if storage.disk is None else storage.disk.threads):
            if threads is not None:
                wait_for_files(threads)

    is_moving = True
    while is_moving:
        wait_for_threads()
        take_posts()
        is_moving = any(image.place in MOVING for image in storage)
    wait_for_threads()


def move_all_out(driver: Driver) -> None:
    """Takes the pages of all parked sessions, and waits for the files."""
    while driver.engine._tiers.reclaim():
        settle(driver)


def scramble(kv: KVTensors, pages: Iterable[int]) -> None:
    """What stands in these pages is overwritten, as by others who take them."""
    for tensor in kv.tensors:
        tensor[list(pages)] = 1e9


def counters_of(driver: Driver) -> TierCounters:
    return driver.engine._tiers.storage.counters
