"""What an engine is held against: it hears what the engine hears, and says of every turn what must come of it.

`PlainEngine` has the sessions as plain lists. Here it is told, in the engine's own order, which turns arrive, which
clients leave, when time passes and when a forward pass is over; and everything that the engine answers is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from microturn.engine.engine import Engine
from microturn.engine.in_flight_step import InFlightStep
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput
from microturn.sessions.options import SessionOptions
from microturn.sessions.session import Session
from microturn.sessions.turn import SessionId, Turn, TurnRequest
from microturn.snapshots.restoring import RestoredSession
from simulation.world import Broken
from support.driver import Recorder
from support.plain_choice import Token
from support.plain_engine import PlainEngine
from support.plain_turn import Ask, Limits, PlainTurn

# Of what a turn says, what changes which tokens come.
_SAMPLING = frozenset(
    {
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("min_tokens", "stop_token_ids", "ignore_eos"),
    }
)
_ASKED = frozenset({"max_tokens", "turn", "rewind_to", "on_overlap", "deadline_ms", "session_key", "seed"})


class PassFailed(Exception):
    """Why passes fail here, and the only reason."""


class Oracle:
    """A plain engine beside a real one.

    Attributes:
        plain: its sessions.

    Args:
        engine: the real one.
        limits: of the server.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.plain = PlainEngine(engine.clock, self._find, limits)
        self._engine = engine
        self._turns: dict[Turn, PlainTurn] = {}
        # Of turns that have come, and that the sessions have not heard of yet.
        self._recorders: dict[Turn, Recorder] = {}
        self.plain.num_coming = lambda: len(engine._arrivals._pending)
        self._is_receiving = False
        request_handler = engine._preparation._request_handler
        self._arrive, self._finish, self._reap = engine._arrive, engine._finish, engine._reap
        self._cancel, self._add = engine._lifecycle.cancel, engine._arrivals._add
        self._receive, self._close = request_handler.receive, engine._lifecycle.close
        for part, name, hear in (
            (engine, "_arrive", self._hear_arrive),
            (engine, "_finish", self._hear_finish),
            (engine, "_reap", self._hear_reap),
            (engine._lifecycle, "cancel", self._hear_cancel),
            (engine._arrivals, "_add", self._hear_add),
            (request_handler, "receive", self._hear_receive),
            (engine._lifecycle, "close", self._hear_close),
        ):
            setattr(part, name, hear)

    def check(self) -> None:
        """Asserts that the engine's sessions, their contexts, their turns and their answers are as they must be."""
        self._engine.check_integrity()
        living, plain = {session.id for session in self._engine._sessions}, set(self.plain.sessions)
        if living != plain:
            raise Broken("sessions", f"{living - plain} live and should not, {plain - living} should and do not")
        for session_id, plain_session in self.plain.sessions.items():
            session = self._find(session_id)
            assert session is not None
            expected = kept_of(session, list(plain_session.now.tokens))
            if tokens_of(session) != expected:
                raise Broken("context", f"session {session_id} holds {tokens_of(session)}, not {expected}")
            if session.open_turns != [turn.turn for turn in plain_session.open]:
                raise Broken("turns", f"session {session_id} has {session.open_turns}, not {plain_session.open}")
        try:
            self.plain.check_answers()
        except AssertionError as error:
            raise Broken("answer", str(error)) from error

    def hear_task(self, task: Callable[..., Any], result: Any) -> None:
        """Somebody who looks after the server has done something with sessions."""
        call = task if isinstance(task, partial) else partial(task)
        match call.func.__name__:
            case "leave":
                self.plain.is_leaving = True
            case "hold" if result is not None:
                self.plain.hold(result.copy.id)
            case "hand_over" if result:
                self.plain.hand_over(call.keywords["copy"].id)
            case "let_go":
                self.plain.let_go(call.keywords["copy"].id)
            case "drain":
                self.plain.is_draining = True
            case "quiesce":
                self.plain.quiesce()

    # ---- what the engine hears -----------------------------------------------------------------------------------

    def _hear_arrive(self, turn: Turn) -> None:
        """A turn comes; it may have to wait for what it needs, or be refused, before the sessions hear of it."""
        self._recorders[turn] = _overhear(turn)
        self._arrive(turn)
        self._recorders = {
            turn: recorder
            for turn, recorder in self._recorders.items()
            if not recorder.is_done or self._engine._preparation._line_of(turn) is not None
        }

    def _hear_receive(self, turn: Turn) -> None:
        recorder = self._recorders.pop(turn)
        is_left = recorder.is_done  # its client went while it waited for what it needs; it is numbered, and goes on
        self._is_receiving = True
        self._receive(turn)
        self._is_receiving = False
        plain = PlainTurn(ask_of(turn.request), turn, recorder, turn.request.arrived_s)
        if is_left:
            plain.recorders.clear()
        self._turns[turn] = plain
        self.plain.arrive(plain)
        self.plain.listen(pass_failed=False)
        self._turns = {turn: plain for turn, plain in self._turns.items() if not plain.recorder.is_done}

    def _hear_close(self, turn: Turn) -> None:
        session = self._find(turn.request.session_id)
        is_owner = session is not None and session.key.matches(turn.request.options.get("session_key"))
        self._close(turn)
        if not self._is_receiving and is_owner and turn.request.end and not turn.request.opens:
            self.plain.close_refused(turn.request.session_id, at_once=turn.interrupts)

    def _hear_add(self, taken: RestoredSession) -> None:
        self._add(taken)
        self.plain.take_up(taken.session.id)

    def _hear_cancel(self, turn: Turn) -> None:
        self._cancel(turn)
        if turn in self._turns:
            self.plain.leave(self._turns[turn])

    def _hear_finish(self, in_flight: InFlightStep) -> None:
        is_anybodys = any(row.is_wanted for row in in_flight.rows)
        error = in_flight.error if in_flight.drawn is None else getattr(in_flight.drawn, "error", None)
        if not isinstance(error, PassFailed | None):
            raise Broken("pass", repr(error)) from error
        self._finish(in_flight)
        self.plain.listen(pass_failed=is_anybodys and error is not None)

    def _hear_reap(self) -> None:
        self._reap()
        self.plain.pass_time()
        self.plain.listen(pass_failed=False)

    def _find(self, session_id: SessionId) -> Session | None:
        return self._engine._sessions.find(session_id)


def ask_of(request: TurnRequest) -> Ask:
    """A turn as the plain engine has it."""
    options, session_options = request.options, request.session_options
    said = {name: value for name, value in options.items() if name in _ASKED and name != "max_tokens"}
    given = _tokens_of_input(request)
    max_tokens = options.get("max_tokens", 16 if given else 0)
    return Ask(
        request.session_id,
        given,
        max_tokens,
        start=request.start,
        end=request.end,
        resume=session_options.resume,
        is_windowed=session_options.overflow == "window",
        fork_of=None if session_options.fork_of is None else _id_named(session_options.fork_of),
        sampling=tuple(sorted((name, value) for name, value in options.items() if name in _SAMPLING)),
        others=tuple(sorted((name, value) for name, value in options.items() if name not in _SAMPLING | _ASKED)),
        is_of_session=replace(session_options, resume=False) != SessionOptions(),
        refusal="" if request.refusal is None else request.refusal.code,
        **said,
    )


def tokens_of(session: Session) -> list[Token]:
    """What a session keeps of its context, an embedding as its bytes."""
    context = session.context
    num_gone = num_forgotten(session)
    tokens: list[Token] = list(context.kept_ids() if num_gone else context.token_ids)
    for span in context.embeds:
        start = span.start - (num_gone if span.start >= context.num_sinks else 0) if num_gone else span.start
        tokens[start : start + len(span.embeds)] = [row.numpy().tobytes() for row in span.embeds]
    return tokens


def kept_of(session: Session, tokens: list[Token]) -> list[Token]:
    """What a session must keep, of all its tokens."""
    num_gone = num_forgotten(session)
    if not num_gone:
        return tokens
    num_sinks = session.context.num_sinks
    return [*tokens[:num_sinks], *tokens[num_sinks + num_gone :]]


def num_forgotten(session: Session) -> int:
    """Tokens behind the sinks that the session has forgotten."""
    return session.context.num_forgotten


def _id_named(name: str) -> SessionId:
    return int(name) if name.isdecimal() else name


def _tokens_of_input(request: TurnRequest) -> tuple[Token, ...]:
    match request.input:
        case TokenInput(token_ids):
            return tuple(token_ids)
        case TextInput(text):
            return tuple(map(ord, text))
        case EmbedInput(embeds):
            return tuple(row.numpy().tobytes() for row in embeds)


def _overhear(turn: Turn) -> Recorder:
    """Keeps what a turn's first client is told, besides telling it."""
    recorder, sink = Recorder(), turn.request.sink
    told: Any = sink
    put, fail = sink.put, sink.fail
    told.put, told.fail = _both(recorder.put, put), _both(recorder.fail, fail)
    return recorder


def _both(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(told: Any) -> None:
        first(told)
        second(told)

    return call
