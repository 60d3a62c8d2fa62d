"""Where saved sessions come back to life: one that somebody asks for has its place among the sessions from then on, is
read and claimed beside the engine's thread, and lives when that is done.

Belongs to the engine's thread, and touches no file there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from microturn.admission import check_room
from microturn.background import Background
from microturn.errors import FailedPrecondition
from microturn.kv_image import PagePart
from microturn.session import Session
from microturn.session_table import SessionTable
from microturn.settings import Settings
from microturn.snapshots.directory import SnapshotDirectory
from microturn.snapshots.look_up import LookUp, TakenUp, check_up_to_date
from microturn.snapshots.session_state import Host
from microturn.snapshots.snapshot import Header
from microturn.tiers.file_thread import Outcome
from microturn.tiers.storage import Storage
from microturn.tiers.stored_kv import StoredKV
from microturn.turn import SessionId, TurnRequest

log = logging.getLogger(__name__)

# What has expired is in plain text until it is removed.
_PURGE_S = 600.0

Told = Callable[[Exception | None], None]


@dataclass(eq=False)
class _Coming:
    """A session that may be about to come.

    Attributes:
        tenant: whose place it has.
        told: called when it is known whether it comes; None when nobody waits.
    """

    tenant: str | None
    told: Told | None

    def is_wanted(self) -> bool:
        """Asked on other threads too."""
        return self.told is not None


class Arrivals:
    """Takes saved sessions up.

    Args:
        settings: the limits.
        sessions: those that live.
        host: what saved sessions find here.
        directory: where those are that clients may ask for; None is nowhere.
        storage: takes the KV that they bring along.
        page_parts: what a page consists of here.
        files: does what is done with the directory.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: SessionTable,
        host: Host,
        directory: SnapshotDirectory | None,
        storage: Storage,
        page_parts: Sequence[PagePart],
        files: Background,
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._host = host
        self._directory = directory
        self._look_up = None if directory is None else LookUp(directory, host, page_parts, self._check)
        self._storage = storage
        self._files = files
        self._coming: dict[SessionId, _Coming] = {}
        self._is_closed = False
        self._next_purge_s = host.clock()
        self._is_purging = False

    @property
    def is_busy(self) -> bool:
        """Whether any session may be about to come."""
        return bool(self._coming)

    # ---- START ---------------------------------------------------------------------------------------------------

    def may_come(self, request: TurnRequest) -> bool:
        """Whether a turn asks for a session that does not live, and may be saved."""
        session_id = request.session_id
        is_known = self._sessions.find(session_id) is not None
        return request.start and not is_known and (self._directory is not None or session_id in self._coming)

    def ask(self, request: TurnRequest, told: Told) -> None:
        """Looks for the session of a START, and takes it up as if it had lived here all the time.

        Args:
            request: of a session that `may_come`. Nobody else asks for the same one until this is told, or given up.
            told: called when the session lives, or there is none, with None; or with why it cannot be taken up.

        Raises:
            ResourceExhausted: there is no room for it.
        """
        session_id = request.session_id
        coming = self._coming.get(session_id)
        if coming is not None:  # somebody asked before, who has given up, or it is being imported
            coming.told = lambda _: self._ask_again(request, told)
            return
        check_room(self._settings, self._sessions, request.options.get("tenant"))
        self._look(request, self._expect(session_id, request.options.get("tenant"), told))

    def give_up(self, session_id: SessionId) -> None:
        """Nobody waits any more."""
        if session_id in self._coming:
            self._coming[session_id].told = None

    def _ask_again(self, request: TurnRequest, told: Told) -> None:
        """What was being looked for, for somebody else, is here, or was not to be had: by them, or at that time."""
        if not self.may_come(request):
            told(None)
            return
        try:
            self.ask(request, told)
        except Exception as error:
            told(error)

    def _look(self, request: TurnRequest, coming: _Coming) -> None:
        assert self._look_up is not None
        newest_epoch = self._sessions.newest_epoch(request.session_id)
        look_up = self._look_up

        def work() -> TakenUp | None:
            return look_up.take_up(request, newest_epoch, coming.is_wanted)

        def end(outcome: Outcome[TakenUp | None]) -> None:
            if outcome.value is not None and self._is_closed:
                look_up.put_back(outcome.value)  # nobody is served any more whom that could hold up
            elif outcome.value is not None:
                self._add(outcome.value)
            self._end(request.session_id, outcome.error)

        self._files.submit(work, end)

    # ---- what others read and claim ------------------------------------------------------------------------------

    def expect(self, session: Session, header: Header) -> None:
        """A saved session is about to be claimed; its place is kept until `admit` or `withdraw`.

        Raises:
            FailedPrecondition: it lives here, is being taken up, or is out of date.
            ResourceExhausted: there is no room for it.
        """
        session_id = header.session_id
        if self._sessions.find(session_id) is not None:
            raise FailedPrecondition(f"session '{session_id}' lives here: close it first")
        if session_id in self._coming:
            raise FailedPrecondition(f"session '{session_id}' is being taken up: try again")
        check_up_to_date(header, self._sessions.newest_epoch(session_id))
        check_room(self._settings, self._sessions, header.tenant)
        self._check(session)
        self._expect(session_id, header.tenant, None)

    def admit(self, taken: TakenUp) -> None:
        """Makes a session live that was expected, and has been claimed."""
        self._add(taken)
        self.withdraw(taken.session.id)

    def withdraw(self, session_id: SessionId) -> None:
        """What was expected does not come, or is here."""
        self._end(session_id, None)

    # ---- the directory -------------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float | None:
        """When the directory is to be looked through for what has expired, by the engine's clock."""
        return None if self._directory is None or self._is_purging else self._next_purge_s

    def purge(self) -> None:
        """Removes what has expired, if it is time."""
        next_s, now_s = self.next_s, self._host.clock()
        if self._directory is None or next_s is None or now_s < next_s:
            return
        self._is_purging = True
        self._next_purge_s = now_s + min(_PURGE_S, self._directory.ttl_s)
        self._files.submit(self._directory.purge, self._has_purged)

    def close(self) -> None:
        """From now on nothing that was claimed is taken up: it stays for another server."""
        self._is_closed = True
        for coming in self._coming.values():
            coming.told = None

    def _check(self, session: Session) -> None:
        """Whether there is room for what a session takes. Called by the file threads, too: it only reads numbers."""
        self._sessions.accounts.check(session, 0)

    def _has_purged(self, outcome: Outcome[None]) -> None:
        self._is_purging = False
        if outcome.error is not None:
            log.error("expired snapshots are still there: %s", outcome.error)

    def _expect(self, session_id: SessionId, tenant: str | None, told: Told | None) -> _Coming:
        self._sessions.keep_place(tenant)
        coming = self._coming[session_id] = _Coming(tenant, told)
        return coming

    def _end(self, session_id: SessionId, error: Exception | None) -> None:
        coming = self._coming.pop(session_id)
        self._sessions.free_place(coming.tenant)
        if coming.told is not None:
            coming.told(error)

    def _add(self, taken: TakenUp) -> None:
        session = taken.session
        if taken.kv is not None:
            image = self._storage.bring(taken.kv)
            session.stored = StoredKV(image, taken.kv.state, self._host.clock())
        else:
            self._files.submit(taken.drop_content, _nobody_asks)
        session.last_activity_s = self._host.clock()
        self._sessions.add(session)


def _nobody_asks(outcome: Outcome[None]) -> None:
    """What could not be done with a file was logged there, or is done by the next who looks."""
