"""The engine: one thread that owns all sessions and turns them, step by step, through the model.

A step is schedule → run → commit. Other threads post to the inbox and never touch a session. The engine knows token
ids, not text (its codec does), and sinks, not responses (the adapter does).
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from microturn.batch import Batch
from microturn.checks import check_request
from microturn.codec import CodecFactory
from microturn.errors import (
    ContextFull,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    MicroturnError,
    ResourceExhausted,
    Unavailable,
)
from microturn.kv_pool import PagePool, PageTable
from microturn.options import TurnOptions
from microturn.prefix_cache import PrefixCache
from microturn.runner import Runner
from microturn.sampler import Sampled, SamplingRow, sample
from microturn.scheduler import ScheduledRow, Scheduler
from microturn.session import Session, SessionTable
from microturn.settings import Settings
from microturn.status import status_of
from microturn.turn import EmbedInput, TextInput, TokenInput, Turn, TurnOutput, is_empty

log = logging.getLogger(__name__)

# A turn without a deadline is due one beat after it came, and one more for each further step that its input takes.
BEAT_S = 0.2

# Options that say what a turn is rather than how turns are answered: START's do not become the session's defaults.
_NOT_DEFAULTS = ("role", "traceparent")


class Engine:
    """Streaming sessions over one model.

    Args:
        settings: how to run.
        runner: the model.
        pool: its pages.
        max_context: tokens that a session may hold at most; they fit the pool.
        new_codec: makes the codec of a new session.
        eos_ids: tokens that end a generation.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: Settings,
        runner: Runner,
        pool: PagePool,
        *,
        max_context: int,
        new_codec: CodecFactory,
        eos_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if pool.num_pages * pool.page_size < max_context:
            raise InvalidArgument(
                f"a pool of {pool.num_pages} pages of {pool.page_size} tokens does not hold one context of "
                f"{max_context} tokens: raise kv_tokens or lower max_context"
            )
        self.settings = settings
        self.max_context = max_context
        self.runner = runner
        self.clock = clock
        self._pool = pool
        self._new_codec = new_codec
        self._eos_ids = eos_ids
        self._sessions = SessionTable()
        self._running: dict[Session, None] = {}
        self._prefixes = PrefixCache(pool)
        self._scheduler = Scheduler(settings.max_batch_tokens, self._reclaim)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_running = False
        self._is_stopping = False
        self._has_ended = threading.Event()

    # ---- called from other threads -------------------------------------------------------------------------------

    def submit(self, turn: Turn) -> None:
        """Posts a turn; its sink is told how it goes."""
        self._inbox.put(partial(self._arrive, turn))
        if self._is_stopping:
            self._take_posts(block=False)  # nobody else does any more, and all of them are refused

    def cancel(self, turn: Turn) -> None:
        """Posts that nobody waits for a turn any more: what it did is undone, its session lives on."""
        self._inbox.put(partial(self._cancel, turn))

    def stop(self) -> None:
        """Ends `run`; turns that run or wait end with UNAVAILABLE, and so do those that come later."""
        self._inbox.put(self._stop)
        if self._is_running:
            self._has_ended.wait()
        self._take_posts(block=False)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serves until `stop`. The thread that calls this owns every session from then on."""
        self._is_running = True
        try:
            while not self._is_stopping:
                self.step(block=True)
        except Exception:
            # A turn's fault is answered to its client; this is ours, and no session can be trusted any more. Who
            # watches the server sees that it answers nothing but UNAVAILABLE.
            log.critical("the engine stops", exc_info=True)
            self._stop()
        finally:
            self._has_ended.set()

    def step(self, *, block: bool = False) -> bool:
        """Takes what was posted, then makes one forward pass.

        Args:
            block: wait for a post when there is nothing to do.

        Returns:
            Whether anything is left to compute.
        """
        self._take_posts(block=block and not self._running)
        if self._is_stopping:
            return False
        self._reap()
        rows = self._scheduler.schedule(self._running)
        if rows:
            self._run(rows)
        return bool(self._running)

    def check_integrity(self) -> None:
        """Asserts that pages, sessions and turns agree."""
        tables = [session.table for session in self._sessions]
        self._pool.check_integrity([*(table.pages for table in tables), *self._prefixes.owned()])
        for session in self._sessions:
            assert session.table.kv_len <= len(session.table.pages) * self._pool.page_size, "KV beyond its pages"
            assert session.table.kv_len <= max(0, len(session.context) - 1), "KV beyond the context"
            assert (session.running is not None) == (session in self._running), "a turn that nobody runs"
            assert session.running is not None or not session.queued, "a turn that waits for nobody"

    def _take_posts(self, *, block: bool) -> None:
        try:
            if block:
                expiry_s = self._sessions.next_expiry_s()
                timeout_s = None if expiry_s is None else max(0.0, expiry_s - self.clock())
                self._inbox.get(timeout=timeout_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _reap(self) -> None:
        now_s = self.clock()
        while (session := self._sessions.pop_expired(now_s)) is not None:
            log.info("session %s expired after %g s of silence", session.id, session.idle_timeout_s)
            self._sessions.end(session, expired=True)

    def _reclaim(self) -> bool:
        return self._prefixes.evict() or self._sessions.reclaim()

    def _stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        for session in list(self._sessions):
            for turn in session.open_turns:
                turn.request.sink.fail(_stopping())
        self._running.clear()

    # ---- arrival -------------------------------------------------------------------------------------------------

    def _arrive(self, turn: Turn) -> None:
        if self._is_stopping:
            turn.request.sink.fail(_stopping())
            return
        try:
            check_request(turn.request, self.runner)
            if turn.request.start:
                self._open(turn)
            else:
                self._enqueue(self._sessions.get(turn.request.session_id), turn)
        except Exception as error:
            turn.request.sink.fail(_told(error))
            self._close_refused(turn)

    def _open(self, turn: Turn) -> None:
        """START: a new session; one of the same id that lives gives way once the new one has proved itself valid."""
        request = turn.request
        replaced = self._sessions.find(request.session_id)
        if replaced is None and len(self._sessions) >= self.settings.max_sessions:
            raise ResourceExhausted(
                f"{self.settings.max_sessions} sessions are open: close one or try again", retry_after_ms=1000
            )
        asked = request.session_options
        max_context = self.max_context if asked.max_context is None else asked.max_context
        if max_context > self.max_context:
            raise InvalidArgument(f"option 'max_context' is at most {self.max_context} here")
        defaults = {name: value for name, value in request.options.items() if name not in _NOT_DEFAULTS}
        seed = defaults.pop("seed", None)
        session = Session(
            id=request.session_id,
            codec=self._new_codec(asked.tools),
            table=PageTable(self._pool),
            defaults=replace(TurnOptions(), **defaults),
            seed=secrets.randbits(63) if seed is None else seed,
            max_context=max_context,
            idle_timeout_s=asked.idle_timeout_s or self.settings.idle_timeout_s,
            last_activity_s=request.arrived_s,
        )
        turn.options = replace(session.defaults, **request.options)
        self._append_input(session, turn)
        if replaced is not None:
            self._reset(replaced)
        self._sessions.add(session)
        session.is_closing = request.end
        self._prefixes.adopt(session.table, session.context)
        self._begin(session, turn)
        self._advance(session)

    def _reset(self, session: Session) -> None:
        """Ends a session that START replaces; its turns end as cancelled."""
        for turn in session.open_turns:
            self._tell_cancelled(session, turn)
        session.queued.clear()
        self._release(session)
        self._sessions.end(session)

    def _enqueue(self, session: Session, turn: Turn) -> None:
        if session.is_closing:
            raise FailedPrecondition(f"session '{session.id}' is closing: open a new one with START")
        if len(session.queued) >= self.settings.max_queued_turns:
            raise ResourceExhausted(
                f"{len(session.queued)} turns wait in this session already: wait for an answer", retry_after_ms=200
            )
        session.last_activity_s = max(session.last_activity_s, turn.request.arrived_s)
        session.is_closing = turn.request.end
        turn.options = replace(session.defaults, **turn.request.options)
        session.queued.append(turn)
        if session.running is None:
            self._advance(session)

    def _close_refused(self, turn: Turn) -> None:
        """END closes its session even when its turn is refused."""
        session = self._sessions.find(turn.request.session_id)
        if session is not None and turn.request.end and not turn.request.start:
            session.is_closing = True
            if session.running is None:
                self._advance(session)

    # ---- a turn's life -------------------------------------------------------------------------------------------

    def _advance(self, session: Session) -> None:
        """Takes the turns that wait, up to one that has something to compute; then parks or ends the session."""
        while session.queued and session.running is None:
            turn = session.queued.popleft()
            try:
                self._append_input(session, turn)
            except Exception as error:
                turn.request.sink.fail(_told(error))
            else:
                self._begin(session, turn)
        if session.running is not None:
            return
        if session.is_closing:
            self._end(session)
        else:
            self._sessions.park(session)

    def _append_input(self, session: Session, turn: Turn) -> None:
        """Appends a turn's input to the context, or raises and appends nothing."""
        context, codec = session.context, session.codec
        turn.context_len_before, turn.text_state_before = len(context), codec.state
        given = turn.request.input
        embeds = given.embeds if isinstance(given, EmbedInput) else None
        try:
            if isinstance(given, TextInput):
                # Tokenizing a text that cannot fit would hold up everybody else.
                self._check_room(session, turn, codec.least_num_ids(given.text, enough=session.max_context))
            ids = self._encode_input(session, turn)
            turn.num_input = len(ids) + (0 if embeds is None else len(embeds))
            if turn.generates and len(context) + turn.num_input == 0:
                raise InvalidArgument("there is nothing to generate from: the context is empty and so is the input")
            self._check_room(session, turn, turn.num_input)
            if turn.generates:
                # A stop string does not count before min_tokens.
                codec.begin_generation(turn.options.stop if turn.options.min_tokens == 0 else ())
        except Exception:
            codec.state = turn.text_state_before
            raise
        context.append_ids(ids)
        if embeds is not None:
            context.append_embeds(embeds)
        turn.appended_ids = ids

    def _encode_input(self, session: Session, turn: Turn) -> list[int]:
        """The ids that a turn's input becomes; before embeddings, those of text that was held and of the template."""
        context, codec, options = session.context, session.codec, turn.options
        given = turn.request.input
        appends = not is_empty(given) or turn.generates
        if not appends and options.role is None:
            return []  # a keep-alive: text that is held stays held
        if isinstance(given, TextInput) or not appends:
            return codec.append_text(
                given.text if isinstance(given, TextInput) else "",
                role=options.role,
                parse_special=options.parse_special,
                flush=turn.generates,
                last_token_id=context.last_token_id,
            )
        ids = codec.append_other(
            role=options.role, last_token_id=context.last_token_id, input_follows=not is_empty(given)
        )
        return [*ids, *given.token_ids] if isinstance(given, TokenInput) else ids

    def _check_room(self, session: Session, turn: Turn, num_input: int) -> None:
        if len(session.context) + num_input + turn.max_tokens > session.max_context:
            raise ContextFull(
                f"{len(session.context)} tokens of context, {num_input} of input and max_tokens="
                f"{turn.max_tokens} exceed max_context={session.max_context}: send less or open a new session"
            )

    def _begin(self, session: Session, turn: Turn) -> None:
        now_s = self.clock()
        turn.begun_s = now_s
        turn.number = session.num_turns
        session.running = turn
        self._sessions.unpark(session)
        turn.num_cached = session.table.kv_len
        num_steps = -(-session.num_pending // self.settings.max_batch_tokens)
        turn.due_s = turn.request.arrived_s + BEAT_S * max(1, num_steps)
        self._running[session] = None
        if not session.num_pending:
            self._finish(session, turn, "append")

    def _run(self, rows: list[ScheduledRow]) -> None:
        batch = Batch([row.build() for row in rows])
        try:
            logits = self.runner.run(batch)
            wanting = [scheduled.session for scheduled, row in zip(rows, batch.rows, strict=True) if row.wants_logits]
            sampled = iter(sample(logits, [self._sampling_row(session) for session in wanting]))
        except Exception as error:
            # Whatever went wrong, the sessions of this step are the only ones it can have touched.
            log.exception("a forward pass of %d rows failed", len(rows))
            for scheduled in rows:
                self._fail(scheduled.session, InternalError(f"the forward pass failed, nothing was appended: {error}"))
            return
        for scheduled, row in zip(rows, batch.rows, strict=True):
            try:
                self._commit(scheduled, next(sampled) if row.wants_logits else None)
            except Exception as error:
                self._fail(scheduled.session, error)

    def _fail(self, session: Session, error: Exception) -> None:
        """Ends the running turn with an error: nothing of it stays."""
        turn = self._roll_back(session)
        turn.request.sink.fail(_told(error))
        self._advance(session)

    def _sampling_row(self, session: Session) -> SamplingRow:
        turn = session.running
        assert turn is not None
        options = turn.options
        stops_early = turn.num_output < options.min_tokens
        return SamplingRow(
            options=options,
            history=session.context.known_ids() if options.has_penalties else (),
            seed=session.seed if options.seed is None else options.seed,
            position=len(session.context),
            banned_ids=self._stop_ids(options) if stops_early else (),
        )

    def _commit(self, scheduled: ScheduledRow, sampled: Sampled | None) -> None:
        session, turn = scheduled.session, scheduled.session.running
        assert turn is not None
        session.table.kv_len += scheduled.num_tokens
        turn.num_computed += scheduled.num_tokens
        if sampled is not None:
            self._commit_token(session, turn, sampled)
        elif not session.num_pending:
            self._finish(session, turn, "append")
        if session.running is None:
            self._advance(session)

    def _commit_token(self, session: Session, turn: Turn, sampled: Sampled) -> None:
        position = len(session.context)
        session.context.append_ids([sampled.token_id])
        turn.num_output += 1
        if turn.first_token_s is None:
            turn.first_token_s = self.clock()
        piece = session.codec.accept(sampled.token_id)
        if turn.num_output == turn.options.min_tokens:
            session.codec.begin_generation(turn.options.stop)
        if piece.stop is not None:
            turn.stop_reason = piece.stop
        elif sampled.token_id in self._stop_ids(turn.options):
            turn.stop_reason = sampled.token_id
        output = TurnOutput(
            token_ids=(sampled.token_id,),
            text=piece.text,
            position=position,
            logprobs=() if sampled.logprob is None else (sampled.logprob,),
        )
        if turn.stop_reason is not None or turn.num_output == turn.max_tokens:
            self._finish(session, turn, "length" if turn.stop_reason is None else "stop", output)
        else:
            turn.request.sink.put(output)

    def _stop_ids(self, options: TurnOptions) -> tuple[int, ...]:
        return options.stop_token_ids if options.ignore_eos else (*options.stop_token_ids, *self._eos_ids)

    def _finish(self, session: Session, turn: Turn, reason: str, output: TurnOutput | None = None) -> None:
        """Ends a turn well: what it appended and generated stays."""
        assert session.running is turn, "only its owner ends a turn"
        output = output or TurnOutput()
        if turn.generates:
            output = replace(output, text=output.text + session.codec.end_generation())
        if turn.request.end and is_empty(turn.request.input) and not turn.generates:
            reason = "closed"
        session.last_activity_s = self.clock()
        session.num_turns += 1
        appended_ids = tuple(turn.appended_ids) if turn.options.return_appended_ids else None
        status = status_of(session, turn, reason, self.clock())
        turn.request.sink.put(replace(output, status=status, appended_ids=appended_ids))
        self._release(session)

    def _roll_back(self, session: Session) -> Turn:
        """Undoes the running turn whole; its client has still to be told."""
        turn = session.running
        assert turn is not None
        session.context.truncate(turn.context_len_before)
        session.codec.state = turn.text_state_before
        session.table.truncate(max(0, turn.context_len_before - 1))
        session.last_activity_s = self.clock()
        self._release(session)
        return turn

    def _release(self, session: Session) -> None:
        session.running = None
        self._running.pop(session, None)

    def _tell_cancelled(self, session: Session, turn: Turn) -> None:
        turn.request.sink.put(TurnOutput(status=status_of(session, turn, "cancelled", self.clock())))

    def _end(self, session: Session) -> None:
        if self.settings.share_prefixes:
            self._prefixes.publish(session.table, session.context)
        self._sessions.end(session)

    def _cancel(self, turn: Turn) -> None:
        session = self._sessions.find(turn.request.session_id)
        if session is None or self._is_stopping:
            return
        if session.running is turn:
            self._roll_back(session)
            self._tell_cancelled(session, turn)
            self._advance(session)
        elif turn in session.queued:
            session.queued.remove(turn)
            self._tell_cancelled(session, turn)


def _stopping() -> Unavailable:
    return Unavailable("the server is stopping: open the session elsewhere")


def _told(error: Exception) -> MicroturnError:
    """An error as its client is told of it."""
    if isinstance(error, MicroturnError):
        return error
    log.error("a turn failed", exc_info=error)
    return InternalError(f"nothing was appended, because of a fault of the server: {error}")
