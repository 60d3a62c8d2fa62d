"""The life of a session as its turns make it: the one place in which a session's state changes.

    START ──▶ opening ──────▶ parked ◀──────────────────────────────┐
                 │              │  a turn: its input is taken in      │  finished, failed, cancelled, out of time,
                 ▼ refused      ▼                                     │  interrupted: then the next one in the queue
             as before       running ─────────────────────────────────┘
                                                                  parked ── END ──▶ closed
                                                                  parked ── silence ──▶ expired

Every turn that is taken here is answered exactly once, by a status or by an error, and only the turn that runs may end
the running state: `finish` and `fail` are given the turn, as its token. What can still fail once a turn has been
answered is *aftermath*: its faults are logged, and neither the turn nor the engine hears of them. Knows turns,
histories and who waits; knows no model and no wire.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from microturn.deadlines import Deadlines
from microturn.errors import DeadlineExceeded, InternalError, MicroturnError, Unavailable
from microturn.intake import take_in, take_out
from microturn.prefix_cache import PrefixCache
from microturn.session import Session
from microturn.session_table import SessionTable
from microturn.status import status_of
from microturn.telemetry.recorder import Recorder
from microturn.turn import BEAT_S, Turn, TurnOutput, is_empty

log = logging.getLogger(__name__)

# A turn that waited, and why its input could not be taken in; None when it was.
Fate = tuple[Turn, MicroturnError | None]


class Lifecycle:
    """What happens to sessions and their turns.

    Attributes:
        running: the sessions that have a turn.

    Args:
        sessions: those that live.
        prefixes: full pages of first turns, which a new session may begin with.
        recorder: is told what a new session began with.
        clock: seconds, monotonic.
        step_len: tokens that one step computes at most.
        model_fingerprint: of the model here, which who opens a session is told; empty where nobody knows.
    """

    def __init__(
        self,
        sessions: SessionTable,
        prefixes: PrefixCache,
        recorder: Recorder,
        clock: Callable[[], float],
        *,
        step_len: int,
        model_fingerprint: str = "",
    ) -> None:
        self.running: dict[Session, None] = {}
        self._sessions = sessions
        self._prefixes = prefixes
        self._recorder = recorder
        self._clock = clock
        self._step_len = step_len
        self._model_fingerprint = model_fingerprint or None
        self._deadlines = Deadlines(self._is_open)

    # ---- turns come ----------------------------------------------------------------------------------------------

    def open(self, session: Session, turn: Turn) -> None:
        """A new session with its first turn, which has been taken in; it replaces one of the same id.

        Raises:
            DeadlineExceeded: the turn's time has passed; then nothing is opened, and nothing replaced.
            ResourceExhausted: the session would take too much; likewise.
        """
        self._check_time(turn)
        replaced = self._sessions.find(session.id)
        self._sessions.accounts.check(session, turn.max_tokens, replaced=replaced)
        if replaced is not None:
            self._reset(replaced)
        session.is_closing = turn.request.end
        self._sessions.add(session)
        try:
            salt = session.prefix_salt
            if salt is not None and session.table.is_empty:
                self._prefixes.adopt(session.table, session.context, salt, max_len=session.max_shared)
                self._recorder.prefix_used(session)
            self._begin(session, turn)
        except Exception:
            self._release(session)
            self._sessions.end(session, "failed")
            raise
        self._deadlines.watch(turn)
        self.advance(session)

    def enqueue(self, session: Session, turn: Turn) -> None:
        """A turn that waits for those before it."""
        self._accept(session, turn)
        session.queued.append(turn)
        self._deadlines.watch(turn)
        self.advance(session)

    def interrupt(self, session: Session, turn: Turn) -> None:
        """A turn that ends those before it: what ran stops where it is, what waits is appended and not answered.

        Raises:
            MicroturnError: why the turn must not run; then the others go on as if it had never come.
        """
        self._check_time(turn)
        text_state = session.codec.state
        last_text = session.codec.end_generation()
        fates = self._take_in_unanswered(session)
        try:
            self._take_in(session, turn, turn.max_tokens)
        except Exception:
            for queued, refusal in reversed(fates):
                if refusal is None:
                    take_out(session, queued)
            session.codec.state = text_state
            raise
        self._end_open_turns(session, fates, last_text, turn.len_before)
        # The others have been told how long the context is now: this cut stays even where the turn itself is undone.
        turn.cut = None
        self._accept(session, turn)
        self._begin_behind(session, turn)
        self._deadlines.watch(turn)
        self.advance(session)

    def close(self, session: Session, *, at_once: bool) -> None:
        """END came with a turn that is refused: the session closes all the same."""
        session.is_closing = True
        if at_once and session.running is not None:
            last_text = session.codec.end_generation()
            fates = self._take_in_unanswered(session)
            self._end_open_turns(session, fates, last_text, len(session.context))
        self.advance(session)

    def _accept(self, session: Session, turn: Turn) -> None:
        session.last_activity_s = max(session.last_activity_s, turn.request.arrived_s)
        session.is_closing = turn.request.end

    # ---- turns run -----------------------------------------------------------------------------------------------

    def advance(self, session: Session) -> None:
        """Goes on where no turn runs: takes those that wait, up to one that has something to compute.

        Where none waits, the session is parked, or ended.
        """
        while session.queued and session.running is None:
            turn = session.queued.popleft()
            try:
                self._check_time(turn)
                self._take_in(session, turn, turn.max_tokens)
            except Exception as error:
                turn.fail(told(error))
                continue
            self._begin_behind(session, turn)
        if session.running is not None:
            return
        with _aftermath():
            if session.is_closing:
                self._sessions.end(session)
            else:
                self._sessions.park(session)

    def _begin_behind(self, session: Session, turn: Turn) -> None:
        """Begins a turn that has been taken in, on what the turns before it left; a fault of that undoes it."""
        session.running = turn
        try:
            session.cut_kv(turn.len_before)
            self._begin(session, turn)
        except Exception as error:
            self._undo(session, turn, error)

    def _take_in(self, session: Session, turn: Turn, max_tokens: int) -> None:
        """Takes a turn's input in, if there is room for that and for what it generates; else nothing changes."""
        take_in(session, turn, max_tokens=max_tokens)
        try:
            self._sessions.accounts.check(session, max_tokens)
        except MicroturnError:
            take_out(session, turn)
            raise

    def _begin(self, session: Session, turn: Turn) -> None:
        turn.begun_s = self._clock()
        session.running = turn
        self.running[session] = None
        self._sessions.unpark(session)
        session.evict()
        self._sessions.accounts.charge(session, turn.max_tokens)
        turn.num_cached = session.kv_len
        if session.num_pending:
            session.beat.note(turn.request.arrived_s)
        num_steps = max(1, -(-session.num_pending // self._step_len))
        due_s = turn.request.arrived_s + BEAT_S * num_steps if turn.deadline_s is None else turn.deadline_s
        turn.due_s = due_s - BEAT_S * session.priority
        if not session.num_pending:
            self.finish(session, turn, "append")

    # ---- turns end -----------------------------------------------------------------------------------------------

    def finish(self, session: Session, turn: Turn, reason: str, output: TurnOutput | None = None) -> None:
        """Ends the running turn well: what it appended and generated stays.

        Args:
            output: its last tokens; none of them by default.
        """
        assert session.running is turn, "only its owner ends a turn"
        output = output or TurnOutput()
        if turn.generates:
            output = replace(output, text=output.text + session.codec.end_generation())
        if turn.request.end and is_empty(turn.request.input) and not turn.generates:
            reason = "closed"
        self._tell_end(session, turn, reason, output)
        self._release(session)
        salt = session.prefix_salt if turn.number == 0 else None
        if salt is not None and session.stored is None:
            with _aftermath():
                self._prefixes.publish(session.table, session.context, salt, max_len=session.max_shared)

    def fail(self, session: Session, turn: Turn, error: Exception) -> None:
        """Ends the running turn with an error: nothing of it stays."""
        self._undo(session, turn, error)
        self.advance(session)

    def _undo(self, session: Session, turn: Turn, error: Exception) -> None:
        self._roll_back(session, turn)
        turn.fail(told(error))

    def cancel(self, turn: Turn) -> None:
        """Nobody waits for a turn any more: it is undone. A numbered one runs on, since its client may ask again.

        END is undone with its turn, but for that of a session which has no other turn: nothing of it would be left.
        """
        session = self._sessions.find(turn.request.session_id)
        if session is None:
            return
        if turn.is_numbered:
            for open_turn in session.open_turns:
                open_turn.detach(turn.request.sink, nobody_waits())
        elif turn in session.open_turns:
            session.is_closing = session.is_closing and (turn.request.opens or not turn.request.end)
            if session.running is turn:
                self._roll_back(session, turn)
            else:
                session.queued.remove(turn)
            self._tell_cancelled(session, turn)
            self.advance(session)

    def expire_turns(self) -> None:
        """Ends the turns whose deadline has passed: with what there is when they run, with an error when they wait."""
        now_s = self._clock()
        while (turn := self._deadlines.pop_late(now_s)) is not None:
            session = self._sessions.find(turn.request.session_id)
            assert session is not None, "an open turn of a session that is not here"
            if session.running is not turn:
                session.queued.remove(turn)
                turn.fail(too_late())
                continue
            try:
                self.finish(session, turn, "deadline")
            except Exception as error:
                self.fail(session, turn, error)
            else:
                self.advance(session)

    def next_deadline_s(self) -> float | None:
        """When `expire_turns` has something to end, by the engine's clock."""
        return self._deadlines.next_s()

    def _is_open(self, turn: Turn) -> bool:
        session = self._sessions.find(turn.request.session_id)
        return session is not None and (session.running is turn or turn in session.queued)

    def _check_time(self, turn: Turn) -> None:
        if turn.is_late(self._clock()):
            raise too_late()

    def undo_all(self, error: MicroturnError) -> None:
        """Answers every turn with an error, and leaves its session as of the last committed point."""
        for session in list(self.running):
            for turn in session.queued:
                turn.fail(error)
            session.queued.clear()
            assert session.running is not None
            self.fail(session, session.running, error)

    def fail_all(self, error: MicroturnError) -> None:
        """Answers every turn with an error; nothing can be done with the sessions after that."""
        for session in self._sessions:
            for turn in session.open_turns:
                turn.fail(error)
            session.queued.clear()
            self._release(session)

    def _take_in_unanswered(self, session: Session) -> list[Fate]:
        """Appends what the waiting turns bring, and says of each whether it was refused, and why."""
        fates: list[Fate] = []
        for turn in session.queued:
            try:
                self._take_in(session, turn, 0)
            except Exception as error:
                fates.append((turn, told(error)))
            else:
                fates.append((turn, None))
        return fates

    def _end_open_turns(self, session: Session, fates: list[Fate], last_text: str, context_len: int) -> None:
        """Ends the running turn and those that waited as interrupted.

        Args:
            fates: what `_take_in_unanswered` said.
            last_text: the last text of the running turn.
            context_len: what is left of the context.
        """
        victim = session.running
        assert victim is not None, "nobody waits where nobody runs"
        session.queued.clear()
        self._release(session)
        self._tell_end(session, victim, "interrupted", TurnOutput(text=last_text), context_len)
        for turn, refusal in fates:
            if refusal is None:
                session.cut_kv(turn.len_before)
                self._tell_end(session, turn, "interrupted", TurnOutput(), context_len)
            else:
                turn.fail(refusal)

    def _tell_end(
        self, session: Session, turn: Turn, reason: str, output: TurnOutput, context_len: int | None = None
    ) -> None:
        """Answers a turn with its last output and its status, and keeps what a repetition would be told."""
        session.last_activity_s = self._clock()
        appended_ids = tuple(turn.appended_ids) if turn.options.return_appended_ids else None
        status = status_of(session, turn, reason, self._clock(), context_len)
        if turn.request.opens:
            status = replace(status, model_fingerprint=self._model_fingerprint)
        session.is_rebuilt = False
        answer = replace(output, status=status, appended_ids=appended_ids)
        with _aftermath():
            turn.put(answer)
        if turn.is_numbered:
            with _aftermath():
                session.results.record(turn)

    def _tell_cancelled(self, session: Session, turn: Turn) -> None:
        if turn.before is None:  # it never ran
            turn.number = session.num_turns
        turn.put(TurnOutput(status=status_of(session, turn, "cancelled", self._clock())))

    def _roll_back(self, session: Session, turn: Turn) -> None:
        """Undoes the running turn whole; its client has still to be told."""
        assert session.running is turn, "only its owner ends a turn"
        session.cut_kv(turn.len_before)
        take_out(session, turn)
        session.last_activity_s = self._clock()
        self._release(session)

    def _release(self, session: Session) -> None:
        session.running = None
        self.running.pop(session, None)

    def _reset(self, session: Session) -> None:
        """Ends a session that START replaces; its turns end as cancelled."""
        for turn in session.open_turns:
            self._tell_cancelled(session, turn)
        session.queued.clear()
        self._release(session)
        self._sessions.end(session, "replaced")


@contextmanager
def _aftermath() -> Iterator[None]:
    """Logs the faults of what follows an answer."""
    try:
        yield
    except Exception:
        log.exception("a fault behind the end of a turn; the turn has been answered")


def nobody_waits() -> Unavailable:
    """What a sink ends with that nobody reads."""
    return Unavailable("nobody waits for this answer any more, and the turn goes on: send it again to hear it")


def too_late() -> DeadlineExceeded:
    """What a turn ends with whose deadline passes before it runs."""
    return DeadlineExceeded("the turn's time passed while it waited: nothing was appended")


def told(error: Exception) -> MicroturnError:
    """An error as its client is told of it."""
    if isinstance(error, MicroturnError):
        return error
    log.error("a turn failed", exc_info=error)
    return InternalError(f"nothing was appended, because of a fault of the server: {error}")
