"""The sessions of a server without a model: START and END, queue and interrupt, rewind and fork, exactly once, keys,
idle times and ``resume``, as the contract has them. What it leaves out: chat templates, windows, deadlines, penalties.

Steps are taken by hand: ``take`` a request, then ``step`` until nothing runs. Knows no threads and no clock of its own.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

from microturn_client._messages_pb2 import ModelInferRequest
from microturn_client._wire import SessionId
from microturn_client.testing._fake_repetitions import is_repetition, remember
from microturn_client.testing._fake_session import FakeSession, FakeTurn, RefusedError, Send
from microturn_client.testing._fake_values import GRAMMAR
from microturn_client.testing._messages import answer, error, read_request

_START_OPTIONS = (
    *("fork_of", "idle_timeout_s", "max_context", "overflow", "sink_tokens", "window_tokens", "history", "tools"),
    "model_fingerprint",
)
_TURN_ALONE = ("turn", "rewind_to", "role", "session_key", "traceparent", "seed", "resume", *_START_OPTIONS, *GRAMMAR)


class FakeSessions:
    """All sessions of one server.

    Attributes:
        max_queued_turns: that may wait behind a running one.
        model_fingerprint: of the model that it would have.
        num_turns_done: turns that ended well, replays and repetitions not counted.

    Args:
        clock: seconds, monotonic.
        max_context: longest context in tokens.
        idle_timeout_s: silence after which a session ends that asks for nothing else.
    """

    max_queued_turns = 8

    def __init__(self, clock: Callable[[], float], *, max_context: int = 8192, idle_timeout_s: float = 60.0) -> None:
        self._clock = clock
        self._max_context = max_context
        self._idle_timeout_s = idle_timeout_s
        self._sessions: dict[SessionId, FakeSession] = {}
        self._sequences: set[SessionId] = set()
        self._expired: dict[SessionId, Any] = {}
        self.model_fingerprint = "fake"
        self.num_turns_done = 0

    @property
    def num_sessions(self) -> int:
        """How many live."""
        return len(self._sessions)

    def context_of(self, session_id: SessionId) -> list[int]:
        """The token ids that a session has; -1 for an embedding."""
        return list(self._sessions[session_id].context)

    @property
    def is_busy(self) -> bool:
        """Whether any turn runs."""
        return any(session.is_busy for session in self._sessions.values())

    # ---- what can befall a server --------------------------------------------------------------------------------

    def forget_sequences(self) -> None:
        """Triton knows no sequence any more; the sessions live."""
        self._sequences.clear()

    def rebuild(self) -> None:
        """All KV is lost, with the inputs that it could be computed from: every session's next status says so."""
        for session in self._sessions.values():
            session.is_rebuilt = True

    def forget_sessions(self) -> None:
        """The model process died: nothing is left, and no turn is answered."""
        self._sessions.clear()
        self._sequences.clear()

    def drop(self, send: Send) -> None:
        """A stream has broken: its unnumbered turns are undone, its numbered ones wait for who asks again."""
        for session in self._sessions.values():
            for turn in [*session.queue, *([session.running] if session.running else [])]:
                turn.sinks = [(request_id, sink) for request_id, sink in turn.sinks if sink is not send]
                if turn.is_numbered or turn.sinks:
                    continue
                if turn is session.running:
                    session.roll_back(turn)
                    session.running = None
                    self._advance(session)
                else:
                    session.queue.remove(turn)

    # ---- turns come ----------------------------------------------------------------------------------------------

    def take(self, message: ModelInferRequest, send: Send) -> None:
        """Takes a turn; what it is told goes to ``send``."""
        request = read_request(message)
        turn = FakeTurn(request, [(request.id, send)])
        self._expire()
        if not request.start and request.session_id not in self._sequences:
            # Triton's own refusal: the model never sees the turn.
            send(error(request.id, "the sequence must specify the START flag on the first request of the sequence"))
            return
        if request.end:  # Triton ends the sequence, whatever becomes of the turn
            self._sequences.discard(request.session_id)
        else:
            self._sequences.add(request.session_id)
        try:
            self._receive(turn)
        except RefusedError as refusal:
            send(error(request.id, str(refusal)))
            session = self._sessions.get(request.session_id)
            if request.start and session is None:
                self._sequences.discard(request.session_id)  # the server gives it up by itself
            if request.end and session is not None and session.key == request.options.get("session_key"):
                self._end(session)

    def _receive(self, turn: FakeTurn) -> None:
        request = turn.request
        if not 0 <= request.options.get("logprobs", 0) <= 20:
            raise RefusedError("INVALID_ARGUMENT: option 'logprobs' is true, false or an integer from 1 to 20")
        session = self._sessions.get(request.session_id)
        key = request.options.get("session_key")
        if session is not None and session.key != key:
            raise RefusedError("PERMISSION_DENIED: the session belongs to somebody else")
        if request.start and not request.options.get("resume"):
            if session is not None and is_repetition(session, turn):
                return
            self._open(turn, session)
            return
        turn.read_grammar(() if session is None else session.tools)
        if session is None:
            if request.session_id in self._expired and self._expired[request.session_id] == key:
                raise RefusedError("EXPIRED: the session was idle for too long")
            raise RefusedError(f"NOT_FOUND: no session '{request.session_id}' is here: open one with START")
        if is_repetition(session, turn):
            return
        turn.options = {**session.defaults, **request.options}
        session.check_number(turn, session.num_turns + sum(not waiting.is_keepalive for waiting in session.queue))
        if turn.interrupts and session.running is not None:
            self._interrupt(session, turn)
            return
        if len(session.queue) >= self.max_queued_turns:
            raise RefusedError("RESOURCE_EXHAUSTED: too many turns wait in this session [retry_after_ms=20]")
        session.queue.append(turn)
        self._advance(session)

    def _open(self, turn: FakeTurn, replaced: FakeSession | None) -> None:
        request = turn.request
        options = request.options
        if options.get("turn", 0) != 0:
            raise RefusedError("INVALID_ARGUMENT: START is turn 0")
        if options.get("model_fingerprint", self.model_fingerprint) != self.model_fingerprint:
            raise RefusedError("FAILED_PRECONDITION: the session is one of another model")
        parent = None
        if "fork_of" in options:
            parent = next((other for name, other in self._sessions.items() if str(name) == options["fork_of"]), None)
            if parent is None:
                raise RefusedError(f"NOT_FOUND: no session '{options['fork_of']}' is here: open one with START")
            if parent.key != options.get("session_key"):
                raise RefusedError("PERMISSION_DENIED: the session belongs to somebody else")
        tools = json.loads(options.get("tools", "[]")) if parent is None else parent.tools
        turn.read_grammar(tools)
        defaults = {name: value for name, value in options.items() if name not in _TURN_ALONE}
        session = FakeSession(
            id=request.session_id,
            key=options.get("session_key"),
            seed=int(options.get("seed", secrets.randbits(63) if parent is None else parent.seed)),
            defaults=defaults if parent is None else {**parent.defaults, **defaults},
            idle_timeout_s=float(options.get("idle_timeout_s", self._idle_timeout_s)),
            max_context=int(options.get("max_context", self._max_context)),
            tools=tools,
        )
        if parent is not None:
            state = parent.running.before if parent.running is not None else None
            context, held, marks = state or (parent.context, parent.held, parent.marks)
            session.context, session.held, session.marks = context[:], held, marks[:]
        turn.options = {**session.defaults, **options}
        session.take_in(turn, turn.max_tokens)
        if replaced is not None:
            for open_turn in [*([replaced.running] if replaced.running else []), *replaced.queue]:
                self._tell_end(replaced, open_turn, "cancelled")
        self._sessions[session.id] = session
        self._begin(session, turn)

    # ---- turns run and end ---------------------------------------------------------------------------------------

    def step(self) -> None:
        """Gives every session that runs one token."""
        for session in list(self._sessions.values()):
            turn = session.running
            if turn is None or not session.is_busy:
                continue
            token_id = session.next_token_of(turn)
            if not turn.output:
                turn.output_position = len(session.context)
            session.context.append(token_id)
            turn.output.append(token_id)
            if turn.finish_reason is not None:
                self._finish(session, turn, turn.finish_reason, last=token_id)
            elif turn.streams:
                for request_id, send in turn.sinks:
                    send(answer(request_id, **turn.piece_of([token_id])))

    def _begin(self, session: FakeSession, turn: FakeTurn) -> None:
        session.running = turn
        session.last_activity_s = self._clock()
        if not turn.max_tokens:
            self._finish(session, turn, "closed" if turn.request.end and turn.request.is_empty else "append")

    def _advance(self, session: FakeSession) -> None:
        while session.queue and session.running is None:
            turn = session.queue.popleft()
            try:
                session.take_in(turn, turn.max_tokens)
            except RefusedError as refusal:
                for request_id, send in turn.sinks:
                    send(error(request_id, str(refusal)))
                if turn.request.end:
                    self._end(session)
            else:
                self._begin(session, turn)

    def _finish(self, session: FakeSession, turn: FakeTurn, reason: str, last: int | None = None) -> None:
        session.running = None
        self._tell_end(session, turn, reason, last=last)
        if turn.request.end:
            self._end(session)
        else:
            self._advance(session)

    def _interrupt(self, session: FakeSession, turn: FakeTurn) -> None:
        victim, queued = session.running, list(session.queue)
        assert victim is not None
        saved = (session.context[:], session.held, session.marks[:], session.num_turns)
        fates: list[tuple[FakeTurn, str | None]] = []
        for waiting in queued:
            try:
                session.take_in(waiting, 0)
                fates.append((waiting, None))
            except RefusedError as refusal:
                fates.append((waiting, str(refusal)))
        try:
            session.take_in(turn, turn.max_tokens)
        except RefusedError:
            session.context, session.held, session.marks, session.num_turns = saved
            raise
        session.queue.clear()
        session.running = None
        length = len(session.context) - turn.num_input
        self._tell_end(session, victim, "interrupted", length=length)
        for waiting, refused in fates:
            if refused is None:
                self._tell_end(session, waiting, "interrupted", length=length)
            else:
                for request_id, send in waiting.sinks:
                    send(error(request_id, refused))
        self._begin(session, turn)

    def _tell_end(
        self, session: FakeSession, turn: FakeTurn, reason: str, *, last: int | None = None, length: int | None = None
    ) -> None:
        session.last_activity_s = self._clock()
        length = len(session.context) if length is None else length
        status = session.status_of(turn, reason, length)
        if session.is_rebuilt:
            status["rebuilt"], session.is_rebuilt = True, reason == "cancelled"
        if turn.request.start and not turn.request.options.get("resume"):
            status["model_fingerprint"] = self.model_fingerprint
        ids = turn.appended if turn.options.get("return_appended_ids") else None
        tail = turn.output if not turn.streams else [] if last is None else [last]
        for request_id, send in turn.sinks:
            send(answer(request_id, **turn.piece_of(tail), status=status, appended_ids=ids))
        self.num_turns_done += reason != "cancelled"
        if turn.is_numbered:
            remember(session, turn, status, ids, max_kept=self.max_queued_turns + 1)

    def _end(self, session: FakeSession) -> None:
        self._sessions.pop(session.id, None)

    def _expire(self) -> None:
        now = self._clock()
        for session in list(self._sessions.values()):
            if not session.is_busy and session.last_activity_s + session.idle_timeout_s < now:
                self._expired[session.id] = session.key
                del self._sessions[session.id]
