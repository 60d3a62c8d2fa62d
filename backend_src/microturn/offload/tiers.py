"""Offloads the KV of sessions from the pool and loads it back.

    pool pages free   0 ────────── begin ─────── enough ──────────── all
                      │ turns      │ parked sessions │
                      │ evict      │ are offloaded,  │ nothing moves
                      │ sessions   │ some pages/step │

Runs on the engine thread, which copies pages between steps, or on a GPU beside them: no more per step than a running
turn can wait for. Only if a turn needs pages and none are free, a whole session is offloaded at once: that is rare, and
takes a hundredth of the time of recomputing it. For the same reason the KV of a preempted session is offloaded to host
memory too. Without a host tier, evicted KV is dropped and recomputed from the tokens.

A session is offloaded once its pages have been read, and restored once all its KV has been loaded. Transfers in
progress are polled in every step, and without steps every millisecond. That costs a few hundredths of a core during a
copy; if the engine waited for the copy, it would not handle requests meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary

from microturn.kv.copier import CopyBudget
from microturn.kv.pool import PagePool
from microturn.kv.stored import StoredKV
from microturn.kv.tensors import KVTensors
from microturn.kv.transfer import Transfer
from microturn.offload.forecast import Forecast, is_away
from microturn.offload.saving import Saving
from microturn.offload.storage import Storage
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable

# Shares of the pool: below the first free share parked sessions are offloaded, until the second is free.
_BEGIN_SHARE = 1 / 16
_ENOUGH_SHARE = 1 / 8

_LOOK_AGAIN_S = 1e-3  # polling interval of transfers in progress


class Tiers:
    """Frees pages for the scheduler, and restores the KV of sessions.

    Attributes:
        load_ahead: loads a session's KV before its next turn, once pages are free.

    Args:
        pool: the pages.
        kv: their content.
        sessions: the live sessions.
        storage: offloaded KV.
        clock: seconds, monotonic.
    """

    def __init__(
        self, pool: PagePool, kv: KVTensors, sessions: SessionTable, storage: Storage, clock: Callable[[], float]
    ) -> None:
        self.storage = storage
        self._pool = pool
        self._kv = kv
        self._sessions = sessions
        self._clock = clock
        self._begin_pages = math.ceil(_BEGIN_SHARE * pool.num_pages)
        self._enough_pages = math.ceil(_ENOUGH_SHARE * pool.num_pages)
        self._is_short = False
        self._saving: Saving | None = None
        self._forecast = Forecast()
        self.load_ahead = self._forecast.want
        # Sessions that have pages, which are being loaded.
        self._arriving: WeakKeyDictionary[Session, None] = WeakKeyDictionary()
        self._for_turns = self._for_later = CopyBudget(0, 1)
        # Background transfers in progress, and whether a session waits for its own.
        self._later: set[Transfer] = set()
        self._is_waiting = self._has_more = False

    # ---- each step -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins a step: renews the copy budgets.

        The background budget is 0 while a background transfer is in progress, so that turns never wait behind many.
        """
        share = self._kv.share
        self._later = {transfer for transfer in self._later if not transfer.is_done()}
        self._for_turns = CopyBudget(share.for_turns, share.unit)
        self._for_later = CopyBudget(0 if self._later else share.for_later, share.unit)
        self._is_waiting = self._has_more = False
        self.storage.begin_step()

    def end_step(self) -> bool:
        """Does a step's share of background copies.

        Returns:
            Whether more could be copied at once.
        """
        self._restore_expected()
        if self.storage.is_there:
            self._save_parked()
        return self._has_more and not self._is_under_way

    def check_integrity(self) -> None:
        """Asserts that the user count of every copy is right."""
        users = Counter(session.stored.image for session in self._sessions if session.stored is not None)
        assert all(image.num_users == number for image, number in users.items()), "users of a copy are counted wrong"
        assert all(image in users or not image.num_users for image in self.storage), "a copy without users"
        self.storage.check_integrity()

    @property
    def next_s(self) -> float | None:
        """When there is work even if no request arrives, by the engine's clock."""
        if self._is_under_way:
            return self._clock() + _LOOK_AGAIN_S
        times_s = (self._forecast.next_s, self.storage.failed.next_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    @property
    def _is_under_way(self) -> bool:
        """Whether a transfer in progress must be polled."""
        return bool(self._later) or self._is_waiting

    # ---- pages for turns -----------------------------------------------------------------------------------------

    def reclaim(self) -> bool:
        """Frees some pages that no running session holds; returns False if there are none."""
        session = self._sessions.parked_longest()
        if session is None:
            return False
        self.offload(session)
        return True

    def offload(self, session: Session) -> None:
        """Releases a session's pages at once. Its KV is offloaded to host memory if there is room, or else dropped."""
        self.storage.counters.preempted += session.running is not None
        if session.stored is None and session.table.kv_len:
            saving = self._saving_of(session, self.storage.make_room)
            if saving is not None:
                self._note_later(self._copy_out(saving, saving.state.num_pages))
                return
            self.storage.counters.dropped += 1
        self._free(session)

    # ---- KV for turns --------------------------------------------------------------------------------------------

    def is_ready(self, session: Session) -> bool:
        """Whether a session's KV is ready to be loaded into pages; if it is on disk, begins to read it."""
        stored = session.stored
        if stored is None:
            return True
        can_be_recomputed = not session.context.num_forgotten
        if not self.storage.fetch(stored.image, is_urgent=True, can_be_recomputed=can_be_recomputed):
            return False
        if stored.image.is_lost:
            assert session.running is not None
            session.running.num_cached = 0
            self._note_restored(session, stored)
            session.drop_kv()
        return True

    def load(self, session: Session) -> bool:
        """Loads ready KV into the session's pages; returns False while some is left for the next step."""
        return session.stored is None or self._copy_in(session, session.stored, self._for_turns)

    # ---- offloading parked sessions ------------------------------------------------------------------------------

    def _save_parked(self) -> None:
        """Offloads parked sessions while too few pages are free, the one parked longest ago first."""
        if self._saving is not None and self._saving.parking != self._sessions.parking_of(self._saving.session):
            self._saving = None
        num_free = self._pool.num_free
        self._is_short = num_free < (self._enough_pages if self._is_short else self._begin_pages)
        while self._is_short:
            session = self._sessions.parked_longest()
            if session is None:
                return
            if not self._for_later.num_left:
                self._has_more = True
                return
            if session.stored is not None:
                self._free(session)  # its expected turn did not come
                continue
            saving = self._saving_of(session, self.storage.has_room)
            if saving is None:
                return
            num_left = saving.state.num_pages - saving.num_copied
            self._note_later(self._copy_out(saving, self._for_later.take(num_left)))
            self._is_short = self._pool.num_free < self._enough_pages

    def _saving_of(self, session: Session, has_room: Callable[[int], bool]) -> Saving | None:
        """The progress of offloading a session; None if there is nothing to copy, or no room."""
        parking = self._sessions.parking_of(session)
        saving = self._saving
        if saving is not None and saving.session is session and saving.parking == parking:
            return saving if has_room(self._kv.image_bytes(saving.state.num_pages)) else None
        state = session.table.save()
        if not has_room(self._kv.image_bytes(state.num_pages)):
            return None
        self._saving = Saving(session, parking, state, self._kv.new_image(state.num_pages))
        return self._saving

    def _copy_out(self, saving: Saving, num_pages: int) -> Transfer:
        """Copies up to `num_pages` more pages; with the last one the session leaves the pool."""
        session, first = saving.session, saving.num_copied
        pages = session.table.used_between(first, first + num_pages)
        assert pages, "a copy of pages that the session has no more"
        self._kv.read(pages, saving.image, first)
        saving.num_copied += len(pages)
        if saving.num_copied == saving.state.num_pages:
            self._saving = None
            image = self.storage.add(saving.image, saving.state)
            session.stored = StoredKV(image, saving.state, self._clock())
            self._free(session)
            if session.running is None:
                self._forecast.note(session, self._clock())
        return saving.image.store_transfer

    def _note_later(self, transfer: Transfer) -> None:
        """Notes a background transfer."""
        if not transfer.is_done():
            self._later.add(transfer)

    def _free(self, session: Session) -> None:
        session.give_up_pages()
        self._sessions.unpark(session)
        self._forecast.forget(session)
        self._arriving.pop(session, None)
        self._has_more = self._has_more or self._forecast.has_waiting  # they wait for pages

    # ---- restoring sessions --------------------------------------------------------------------------------------

    def _restore_expected(self) -> None:
        """Restores sessions before their expected turns, into pages that are free."""
        seen = (self._pool.num_free, self.storage.host.used_bytes, self.storage.counters.read_from_disk)
        for session in list(self._arriving):
            self._load_more(session)
        if self._forecast.visit(self._clock(), seen, self._begin_to_load, lambda: self._for_later.num_left > 0):
            self._has_more = True

    def _begin_to_load(self, session: Session) -> bool:
        """Allocates a session's pages; returns False if it has to wait."""
        assert session.stored is not None
        # Without another tier what is evicted is lost: the last pages stay free. No file is read before some are free.
        num_free = self._pool.num_free - (0 if self.storage.is_there else self._enough_pages)
        if session.table.is_empty and session.num_pages_with(0) > num_free:
            return False
        if not self.storage.fetch(session.stored.image, is_urgent=False) or not session.reserve(0):
            return False
        self._arriving[session] = None
        self._load_more(session)
        return True

    def _load_more(self, session: Session) -> None:
        """Loads some more pages of a session that has pages."""
        stored = session.stored
        if stored is None or not is_away(session) or session.table.is_empty:
            del self._arriving[session]
            return
        self._sessions.park(session)
        is_back = self._copy_in(session, stored, self._for_later)
        self._note_later(stored.load_transfer)
        if is_back:
            del self._arriving[session]
            self.storage.counters.restored_ahead += 1
            self.storage.counters.restored_ahead_from_disk += stored.image.was_in_file

    def _copy_in(self, session: Session, stored: StoredKV, budget: CopyBudget) -> bool:
        """Loads some more pages once the ones before are loaded; returns whether the session is restored."""
        num_left = max(0, session.table.save().num_pages - stored.num_copied)
        if stored.load_transfer.is_done() and (num_pages := budget.take(num_left)):
            assert stored.image.pages is not None
            pages = session.table.used_between(stored.num_copied, stored.num_copied + num_pages)
            stored.load_transfer = self._kv.write(pages, stored.image.pages, stored.num_copied)
            stored.num_copied += num_pages
            num_left -= num_pages
        if not stored.load_transfer.is_done():
            self._is_waiting = True
            return False
        if num_left:
            self._has_more = True
            return False
        self._note_restored(session, stored)
        session.drop_stored()
        self.storage.counters.restored += 1
        self.storage.counters.restored_from_disk += stored.image.was_in_file
        return True

    def _note_restored(self, session: Session, stored: StoredKV) -> None:
        """Notes the wait of the running turn; a wait after its first token counts as decoding."""
        turn = session.running
        if turn is not None and turn.first_token_s is None:
            turn.restore_s += self._clock() - max(turn.begun_s, stored.moved_s)
