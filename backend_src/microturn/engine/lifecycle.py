"""The states of a session, and the one place where they change.

    nothing ── START ────────────────────────────────────────▶ running; as before, where it is refused
    parked ─── a turn: its input is appended ────────────────▶ running; turns that come meanwhile are queued
    running ── finished, failed, cancelled, late, interrupted ─▶ running, with the next turn of the queue; else parked
    running ── nobody hears its numbered turn any more ──────▶ paused and parked; running again when somebody does
    parked ─── held: it is being saved, and turns that come are queued ─▶ handed over to another server; else parked
    parked ─── silence ──▶ expired          parked, after END ──▶ closed          any ── replaced by START ──▶ closed

Every turn that is accepted here is answered exactly once, by a status or by an error, and only the turn that runs may
end the running state: `finish` and `fail` are given the turn, as its token.
"""

from __future__ import annotations

from collections.abc import Callable

from microturn.engine.answers import AFTERMATH, abandoned, answer_cancelled, answer_end, to_client_error
from microturn.engine.attendance import attend
from microturn.errors import MicroturnError
from microturn.kv.prefix_cache import PrefixCache
from microturn.sessions.deadlines import Deadlines, check_time, too_late
from microturn.sessions.intake import append_input, append_queued, roll_back_input, undo_end
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable
from microturn.sessions.turn import Turn, TurnOutput
from microturn.telemetry.recorder import Recorder


class Lifecycle:
    """What happens to sessions and their turns.

    Attributes:
        running: the sessions that have a turn.
        deadlines: of the turns that are open.

    Args:
        sessions: those that live.
        prefixes: full pages of first turns, which a new session may begin with.
        recorder: counts what a new session began with.
        clock: seconds, monotonic.
        step_len: tokens that one step computes at most.
    """

    def __init__(
        self,
        sessions: SessionTable,
        prefixes: PrefixCache,
        recorder: Recorder,
        clock: Callable[[], float],
        step_len: int,
    ) -> None:
        self.running: dict[Session, None] = {}
        self.deadlines = Deadlines()
        self._sessions = sessions
        self._prefixes = prefixes
        self._recorder = recorder
        self._clock = clock
        self._step_len = step_len

    # ---- turns come ----------------------------------------------------------------------------------------------

    def open(self, session: Session, turn: Turn) -> None:
        """A new session with its first turn, whose input it holds; it replaces one of the same id.

        Raises:
            DeadlineExceeded: the turn's time has passed; then nothing is opened, and nothing replaced.
            ResourceExhausted: the session would take too much; likewise.
        """
        check_time(turn, self._clock())
        replaced = self._sessions.find(session.id)
        self._sessions.accounts.check(session, turn.max_tokens, replaced=replaced)
        if replaced is not None:
            self._replace(replaced)
        self._accept(session, turn)
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
        self.advance(session)

    def enqueue(self, session: Session, turn: Turn) -> None:
        """A turn that waits for those before it."""
        self._accept(session, turn)
        session.queued.append(turn)
        self.advance(session)

    def interrupt(self, session: Session, turn: Turn) -> None:
        """A turn that ends those before it: the one that runs stops here, those that wait are appended unanswered.

        Raises:
            MicroturnError: why the turn must not run; then the others go on as if it had never come.
        """
        check_time(turn, self._clock())
        text_state = session.codec.state
        last_text = session.codec.end_generation()
        outcomes = append_queued(session, self._sessions.accounts)
        try:
            # The clients of the others will know the new length of the context: this cut stays if the turn is undone.
            append_input(session, turn, max_tokens=turn.max_tokens, accounts=self._sessions.accounts, undoes_cut=False)
        except Exception:
            for queued in reversed([queued for queued, refusal in outcomes.items() if refusal is None]):
                roll_back_input(session, queued)
            session.codec.state = text_state
            raise
        self._end_interrupted(session, outcomes, last_text, turn.len_before)
        self._accept(session, turn)
        self._begin_behind(session, turn)
        self.advance(session)

    def close(self, turn: Turn) -> None:
        """END closes its session even when its turn is refused, if the request may speak for the session."""
        request = turn.request
        session = self._sessions.find_owned(request) if request.end and not request.opens else None
        if session is None:
            return
        turn.resolve_options(session.defaults)
        session.is_closing = True
        if turn.interrupts and session.running is not None:
            last_text = session.codec.end_generation()
            self._end_interrupted(
                session, append_queued(session, self._sessions.accounts), last_text, len(session.context)
            )
        self.advance(session)

    def _accept(self, session: Session, turn: Turn) -> None:
        session.last_activity_s = max(session.last_activity_s, turn.request.arrived_s)
        session.is_closing = turn.request.end
        self.deadlines.watch(turn)

    # ---- turns run -----------------------------------------------------------------------------------------------

    def advance(self, session: Session) -> None:
        """Begins the turns that wait, up to one that has something to compute; else parks or ends the session."""
        while session.queued and session.running is None and session.held_as is None:
            turn = session.queued.popleft()
            try:
                check_time(turn, self._clock())
                append_input(session, turn, max_tokens=turn.max_tokens, accounts=self._sessions.accounts)
            except Exception as error:
                turn.fail(to_client_error(error))
                continue
            self._begin_behind(session, turn)
        if session.running is not None:
            self.attend(session)
        elif not session.queued and session.held_as is None:
            with AFTERMATH:
                if session.is_closing:
                    self._sessions.end(session)
                else:
                    self._sessions.park(session)

    def _begin_behind(self, session: Session, turn: Turn) -> None:
        """Begins a turn whose input is appended, on what the turns before it left; a fault of that undoes it."""
        session.running = turn
        try:
            session.cut_kv(turn.len_before)
            self._begin(session, turn)
        except Exception as error:
            self._roll_back(session, turn)
            turn.fail(to_client_error(error))

    def _begin(self, session: Session, turn: Turn) -> None:
        session.running = turn
        self.running[session] = None
        self._sessions.unpark(session)
        session.evict()
        self._sessions.accounts.charge(session, turn.max_tokens)
        num_pending = session.num_pending
        if num_pending:
            session.beat.note(turn.request.arrived_s)
        num_steps = max(1, -(-num_pending // self._step_len))
        turn.begin(self._clock(), num_cached=session.kv_len, num_steps=num_steps, priority=session.priority)
        if not num_pending:
            self.finish(session, turn, "append")

    def attend(self, session: Session) -> None:
        """Pauses a session whose turns nobody hears any more, or goes on with it: see `attendance`."""
        attend(session, self.running, self._sessions, self._clock())

    # ---- turns end -----------------------------------------------------------------------------------------------

    def finish(self, session: Session, turn: Turn, reason: str, output: TurnOutput | None = None) -> None:
        """Ends the running turn well: what it appended and generated stays. `output` brings its last tokens."""
        assert session.running is turn, "only its owner ends a turn"
        output = TurnOutput() if output is None else output
        if turn.generates:
            output = output._replace(text=output.text + session.codec.end_generation())
        if turn.request.end and turn.request.input.is_empty and not turn.generates:
            reason = "closed"
        answer_end(session, turn, reason, output, self._clock())
        self._release(session)
        salt = session.prefix_salt if turn.number == 0 else None
        if salt is not None and session.stored is None:
            with AFTERMATH:
                self._prefixes.publish(session.table, session.context, salt, max_len=session.max_shared)

    def fail(self, session: Session, turn: Turn, error: Exception) -> None:
        """Ends the running turn with an error: nothing of it stays."""
        self._roll_back(session, turn)
        turn.fail(to_client_error(error))
        self.advance(session)

    def cancel(self, turn: Turn) -> None:
        """The client has gone: its turn is undone. A numbered one is paused, since its client may ask again."""
        session = self._sessions.find(turn.request.session_id)
        if session is None:
            return
        if turn.is_numbered:
            for open_turn in session.open_turns:
                open_turn.detach(turn.request.sink, abandoned())
        elif turn in session.open_turns:
            undo_end(session, turn)
            if session.running is turn:
                self._roll_back(session, turn)
            else:
                session.queued.remove(turn)
            answer_cancelled(session, turn, self._clock())
            self.advance(session)
        self.attend(session)

    def expire_turns(self) -> None:
        """Ends the turns whose deadline has passed: with what there is when they run, with an error when they wait."""
        now_s = self._clock()
        while (turn := self.deadlines.pop_late(now_s)) is not None:
            session = self._sessions.find(turn.request.session_id)
            assert session is not None, "an open turn of a session that is not here"
            if session.running is not turn:
                session.queued.remove(turn)
                turn.fail(too_late())
            else:
                try:
                    self.finish(session, turn, "deadline")
                except Exception as error:
                    self.fail(session, turn, error)
                    continue
            self.advance(session)

    def fail_all(self, error: MicroturnError) -> None:
        """Answers every turn with an error; nothing can be done with the sessions after that."""
        for session in self._sessions:
            self._fail_turns(session, error)

    def end(self, session: Session, reason: str, error: MicroturnError, route: str | None = None) -> None:
        """Ends a session as `SessionTable.end` does, whatever it does; its turns are answered with an error."""
        self._fail_turns(session, error)
        self._sessions.end(session, reason, route)

    def _fail_turns(self, session: Session, error: MicroturnError) -> None:
        for turn in session.open_turns:
            turn.fail(error)
        session.queued.clear()
        self._release(session)

    def _end_interrupted(
        self, session: Session, outcomes: dict[Turn, Exception | None], last_text: str, context_len: int
    ) -> None:
        """Ends the running turn and those that waited as interrupted; so much is left of the context."""
        interrupted = session.running
        assert interrupted is not None, "queued turns wait for a running one"
        session.queued.clear()
        self._release(session)
        answer_end(session, interrupted, "interrupted", TurnOutput(text=last_text), self._clock(), context_len)
        for turn, refusal in outcomes.items():
            if refusal is None:
                session.cut_kv(turn.len_before)
                answer_end(session, turn, "interrupted", TurnOutput(), self._clock(), context_len)
            else:
                turn.fail(to_client_error(refusal))

    def _roll_back(self, session: Session, turn: Turn) -> None:
        """Undoes the running turn whole; its client has still to be answered."""
        assert session.running is turn, "only its owner ends a turn"
        session.cut_kv(turn.len_before)
        roll_back_input(session, turn)
        session.last_activity_s = self._clock()
        self._release(session)

    def _release(self, session: Session) -> None:
        session.running = None
        self.running.pop(session, None)

    def _replace(self, session: Session) -> None:
        """Ends a session that START replaces; its turns end as cancelled."""
        for turn in session.open_turns:
            answer_cancelled(session, turn, self._clock())
        session.queued.clear()
        self._release(session)
        self._sessions.end(session, "replaced")
