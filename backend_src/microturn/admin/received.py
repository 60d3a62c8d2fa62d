"""Sessions that another server hands over, with their KV: read from a stream, and made live here.

    KV of a session that still runs there ── ahead ──┐
    the session, and the KV that has come since ─────┴──▶ lives here; its KV is loaded while pages are free

A session counts as here from when its KV begins to come. Servers that even themselves out say with how many there are
enough: only this one sees what all of them send.

The KV stays in host memory until then, at the latest until its session's next turn. There is a limit for all of it;
what exceeds that is refused, but for the KV of one session alone.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from microturn.engine.engine import Engine
from microturn.engine.maintenance import Maintenance
from microturn.errors import InvalidArgument, ResourceExhausted
from microturn.kv.image import KVImage, PagePart
from microturn.kv.table_state import TableState
from microturn.offload.image_file import ReadsInto, read_into
from microturn.sessions.turn import SessionId
from microturn.snapshots.file import Readable, UnreadableSnapshot, read_from
from microturn.snapshots.kv_files import read_part
from microturn.snapshots.kv_part import KVPart
from microturn.snapshots.restoring import RestoredSession, check_kv
from microturn.snapshots.session_state import restore_session

# Of the bytes of the pool: what may wait in host memory to be loaded.
_SHARE_OF_POOL = 0.5
# Pages that a session may get while its KV is sent ahead, at least, without another copy of it all.
_MIN_MORE_PAGES = 64
# KV that was sent ahead is dropped when its session has not followed.
_AHEAD_S = 60.0
# How long a session has just come: it is not moved again to even out servers.
_STAYS_S = 60.0


class Stream(Readable, ReadsInto, Protocol):
    """What a session with its KV is read from."""


class ReceivedKV:
    """A `KVSource` in host memory.

    Args:
        state: of the page table that the pages belong to.
        image: the pages.
        num_bytes: of the memory that was taken for them.
        room: gets the memory back.
        is_loadable: whether they can be loaded into the pool from where they are.
    """

    def __init__(self, state: TableState, image: KVImage, num_bytes: int, room: _Room, *, is_loadable: bool) -> None:
        self._state = state
        self._image: KVImage | None = image
        self._num_bytes = num_bytes
        self._room = room
        self._is_loadable = is_loadable

    @property
    def pages(self) -> KVImage | None:
        return self._image if self._is_loadable else None

    @property
    def state(self) -> TableState:
        return self._state

    def read(self, pages: KVImage) -> None:
        """Copies the pages.

        Raises:
            OSError: they have been dropped.
        """
        image = self._image
        if image is None:
            raise OSError("KV that another server has sent is in use by now")
        pages.fill(0, image, image.num_pages)

    def drop(self) -> None:
        if self._image is not None:
            self._image = None
            self._room.give_back(self._num_bytes)


class _Room:
    """Counts the host memory of KV that waits. For one session's there is always room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int, own_bytes: int = 0) -> None:
        """Raises ResourceExhausted where there is none.

        Args:
            num_bytes: how much.
            own_bytes: that the same session has already.
        """
        with self._lock:
            if self._used_bytes > own_bytes and self._used_bytes + num_bytes > self._max_bytes:
                raise ResourceExhausted(
                    f"{self._used_bytes} bytes of KV wait here already, of at most {self._max_bytes}: send it later, "
                    "elsewhere, or the session without it"
                )
            self._used_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._used_bytes -= num_bytes


@dataclass
class _Ahead:
    """KV that was sent ahead of its session, in an image with room for what follows.

    Attributes:
        num_bytes: of the memory that was taken for it.
    """

    image: KVImage
    num_bytes: int
    received_s: float = field(default_factory=time.monotonic)


class Receiver:
    """Takes sessions from other servers; callable in any thread.

    Args:
        engine: runs in its own thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        kv = engine.runner.kv
        self._parts = kv.page_parts
        self._is_loadable = kv.loads_any_image
        self._room = _Room(int(_SHARE_OF_POOL * engine.environment.pool.num_pages * kv.bytes_per_page))
        self._ahead: dict[str, _Ahead] = {}
        self._coming: set[str] = set()  # transfers whose KV is here, or comes
        self._came_s: dict[SessionId, float] = {}
        self._lock = threading.Lock()

    @property
    def num_coming(self) -> int:
        """Sessions that are about to live here: their KV comes, or has come."""
        return len(self._coming)

    def came_lately(self) -> set[SessionId]:
        """Sessions that have come within a minute."""
        self.drop_old()
        with self._lock:
            return set(self._came_s)

    def drop_old(self) -> None:
        """Drops KV that was sent ahead and whose session has not followed. To be called every now and then."""
        with self._lock:
            lately_s = time.monotonic() - _STAYS_S
            self._came_s = {session_id: came_s for session_id, came_s in self._came_s.items() if came_s > lately_s}
            due = [name for name, one in self._ahead.items() if one.received_s < time.monotonic() - _AHEAD_S]
            dropped = [self._ahead.pop(name) for name in due]
            self._coming.difference_update(due)
        self._room.give_back(sum(one.num_bytes for one in dropped))

    def take_ahead(self, transfer: str, stream: Stream, enough: float = math.inf) -> None:
        """Reads KV whose session will follow.

        Args:
            transfer: names it.
            stream: at a header with a `KVPart`; the KV follows.
            enough: the number of sessions with which it is not taken.

        Raises:
            InvalidArgument: it is not KV that can be used here.
            ResourceExhausted: there is no room for it, or there are enough sessions.
        """
        with self._lock:
            self._coming.add(transfer)
        try:
            if enough < math.inf:
                # It counts already, so that of two that come at once both see the other.
                self._engine.call(lambda sessions: self._check_enough(sessions, enough + 1))
            self._read_ahead(transfer, stream)
        except BaseException:
            with self._lock:
                self._coming.discard(transfer)
            raise

    def _check_enough(self, sessions: Maintenance, enough: float) -> None:
        if sessions.load.num_sessions + self.num_coming >= enough:
            raise ResourceExhausted("other servers have sent as many sessions as this one should have")

    def _read_ahead(self, transfer: str, stream: Stream) -> None:
        try:
            part = read_part(stream)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        if not part.is_of(self._parts):
            raise InvalidArgument("the KV is of another model, kv_dtype or page_size")
        num_pages = part.state.num_pages
        image = KVImage(self._parts, num_pages, pages_per_block=num_pages + max(_MIN_MORE_PAGES, num_pages // 8))
        self._room.take(part.num_bytes)
        try:
            _read_pages(stream, image, 0, part)
        except BaseException:
            self._room.give_back(part.num_bytes)
            raise
        with self._lock:
            self._ahead[transfer] = _Ahead(image, part.num_bytes)

    def take(self, transfer: str, stream: Stream, num_bytes: int, epoch_before: int, enough: float = math.inf) -> None:
        """Reads a session and makes it live; its client is expected with START and resume.

        Args:
            transfer: names the KV that was sent ahead; empty where none was.
            stream: at a snapshot, whose KV is without what was sent ahead.
            num_bytes: of the snapshot.
            epoch_before: that the session had before.
            enough: the number of sessions with which one is not taken of which nothing was sent ahead.

        Raises:
            InvalidArgument: it is not a session.
            Unavailable: this server is about to stop.
            FailedPrecondition: it is of another model, or lives here.
            ResourceExhausted: there is no room for it, or there are enough sessions.
        """
        with self._lock:
            ahead = self._ahead.pop(transfer, None)
            if ahead is not None:
                enough = math.inf
        num_bytes_taken = 0 if ahead is None else ahead.num_bytes
        kv: ReceivedKV | None = None
        try:
            try:
                snapshot = read_from(stream, num_bytes)
            except UnreadableSnapshot as error:
                raise InvalidArgument(f"the session cannot be read: {error}") from error
            session = restore_session(snapshot, self._engine.environment)
            part = snapshot.kv
            if part is not None:
                try:
                    check_kv(part, session, self._parts)
                except ValueError as error:
                    raise InvalidArgument(f"the KV of session '{session.id}' cannot be used here: {error}") from error
                self._room.take(part.num_bytes, num_bytes_taken)
                num_bytes_taken += part.num_bytes
                image = _image_of(part, None if ahead is None else ahead.image, self._parts)
                _read_pages(stream, image, part.num_before, part)
                kv = ReceivedKV(part.state, image, num_bytes_taken, self._room, is_loadable=self._is_loadable)
            taken = RestoredSession(session, kv)

            def receive(sessions: Maintenance) -> None:
                self._check_enough(sessions, enough)
                sessions.receive(taken, snapshot.header, epoch_before)

            self._engine.call(receive)
            with self._lock:
                self._came_s[session.id] = time.monotonic()
        except BaseException:
            self._room.give_back(num_bytes_taken)
            raise
        finally:
            with self._lock:
                self._coming.discard(transfer)
        if kv is None:
            self._room.give_back(num_bytes_taken)


def _image_of(part: KVPart, ahead: KVImage | None, parts: Sequence[PagePart]) -> KVImage:
    """An image for all pages of a session, those that were sent ahead in their place."""
    num_pages = part.state.num_pages
    if part.num_before > (0 if ahead is None else ahead.num_pages):
        raise InvalidArgument("KV that was sent ahead is not here any more")
    if ahead is not None and ahead.resize(num_pages):
        return ahead
    image = KVImage(parts, num_pages)
    if ahead is not None:
        image.fill(0, ahead, part.num_before)
    return image


def _read_pages(stream: ReadsInto, image: KVImage, first: int, part: KVPart) -> None:
    if sum(read_into(stream, piece) for piece in image.contents(first)) < part.num_bytes:
        raise InvalidArgument("the stream ended within the KV")
