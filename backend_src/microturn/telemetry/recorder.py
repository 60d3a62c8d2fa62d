"""Records events of the engine: metrics, and a log line when a session begins or ends.

Called on the engine thread. Counting takes a microsecond per turn; the lines are written by another thread (see
`log_lines`), and contain what users say only if a setting asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from microturn.errors import DeadlineExceeded, MicroturnError, ResourceExhausted
from microturn.sessions.inputs import TextInput, TokenInput
from microturn.sessions.session import Session
from microturn.sessions.turn import Status, Turn, TurnRequest
from microturn.settings import Settings
from microturn.telemetry.latencies import Latencies, latencies_of
from microturn.telemetry.metrics import Metrics

log = logging.getLogger(__name__)
sessions_log = logging.getLogger("microturn.sessions")
turns_log = logging.getLogger("microturn.turns")

# Finish reasons of turns that were not cut short by a client or a deadline.
_IN_TIME = frozenset({"length", "stop", "complete", "append", "closed"})


class Recorder:
    """Records events of an engine.

    Attributes:
        metrics: of the engine.

    Args:
        settings: of the engine.
    """

    def __init__(self, settings: Settings) -> None:
        self.metrics = Metrics()
        self.metrics.sessions_limit.set(settings.max_sessions)
        self._logs_turns = settings.log_turns != "none"
        self._logs_text = settings.log_turns == "text"

    # ---- sessions ------------------------------------------------------------------------------------------------

    def session_opened(self, session: Session) -> None:
        """A session has been opened."""
        self.metrics.sessions_opened.add(session.origin)
        _say(session, "session opened", origin=session.origin, context_len=len(session.context), kv_len=session.kv_len)

    def session_ended(self, session: Session, reason: str) -> None:
        """A session has ended."""
        self.metrics.sessions_ended.add(reason)
        _say(
            session,
            f"session {reason}",
            context_len=len(session.context),
            num_turns=session.num_turns,
            active_s=round(session.last_activity_s - session.opened_s, 3),
        )

    def engine_stopped(self, sessions: Iterable[Session], *, has_failed: bool) -> None:
        """The engine has stopped: its sessions have ended, and gauges are not updated again."""
        for session in sessions:
            self.session_ended(session, "failed" if has_failed else "stopped")
        for gauge in (self.metrics.sessions, self.metrics.turns_open):
            for labels in gauge.series:
                gauge.set(0, *labels)

    def prefix_used(self, session: Session) -> None:
        """A new session has begun with KV from the prefix cache."""
        num_hit = session.table.kv_len
        self.metrics.prefix_tokens.add("hit", by=num_hit)
        self.metrics.prefix_tokens.add("miss", by=len(session.context) - num_hit)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def watch(self, turn: Turn) -> None:
        """Records a turn when it ends."""
        turn.on_end = self._turn_ended
        turn.keeps_pieces = turn.keeps_pieces or self._logs_text

    def turn_repeated(self) -> None:
        """A repeated turn is answered from its record."""
        self.metrics.repetitions.add()

    def _turn_ended(self, turn: Turn, answer: Status | MicroturnError) -> None:
        is_health_turn = _is_health_turn(turn.request)
        if isinstance(answer, MicroturnError):
            # That a health turn finds no room is known from `new-sessions`: nobody was refused.
            if not (isinstance(answer, ResourceExhausted) and is_health_turn):
                self.metrics.turn_errors.add(answer.code)
            if isinstance(answer, DeadlineExceeded):
                self.metrics.deadlines.add("missed")
        else:
            self._count(turn, answer)
        if self._logs_turns and not is_health_turn:
            turns_log.info("turn ended", extra={"fields": self._line_of(turn, answer)})

    def _count(self, turn: Turn, status: Status) -> None:
        metrics, reason = self.metrics, status.finish_reason
        metrics.turns.add(reason)
        if turn.options.deadline_ms and (reason == "deadline" or reason in _IN_TIME):
            metrics.deadlines.add("missed" if reason == "deadline" else "met")
        if reason == "cancelled":
            return
        if status.rebuilt:
            metrics.kv_rebuilds.add()
        if turn.num_cut:
            metrics.rewinds.add()
            metrics.rewound_tokens.add(by=turn.num_cut)
        if turn.options.count_only:
            return
        for name, num_tokens in status.usage.items():
            if num_tokens:
                metrics.turn_tokens.add(name.removesuffix("_tokens"), by=num_tokens)
        if turn.checkpoint is not None and turn.num_computed and turn.len_before > 1 and not turn.num_cached:
            metrics.kv_restores.add("tokens", "false")
        latencies = latencies_of(turn, status)
        if latencies is not None:
            self._time(turn, status, latencies)

    def _time(self, turn: Turn, status: Status, latencies: Latencies) -> None:
        timing_ms = status.timing_ms
        self.metrics.turn_seconds.observe(latencies.total_s)
        phases = self.metrics.turn_phase_seconds
        phases.observe(timing_ms["queue"] / 1e3, "queue")
        if turn.restore_s:
            phases.observe(turn.restore_s, "restore")
        if turn.num_computed:
            phases.observe(timing_ms["prefill"] / 1e3, "prefill")
        if latencies.first_token_s is not None:
            phases.observe(timing_ms["decode"] / 1e3, "decode")
            self.metrics.first_token_seconds.observe(latencies.first_token_s)
        if latencies.output_token_s is not None:
            self.metrics.output_token_seconds.observe(latencies.output_token_s)

    def _line_of(self, turn: Turn, answer: Status | MicroturnError) -> dict[str, Any]:
        line: dict[str, Any] = {"session": str(turn.request.session_id), "traceparent": turn.options.traceparent}
        if isinstance(answer, MicroturnError):
            line |= {"code": answer.code, "error": answer.args[0]}
        else:
            timing_ms = {f"{phase}_ms": round(time_ms, 3) for phase, time_ms in answer.timing_ms.items()}
            line |= {"turn": answer.turn, "finish_reason": answer.finish_reason, **answer.usage, **timing_ms}
        if self._logs_text:
            given = turn.request.input
            if isinstance(given, TextInput | TokenInput) and not given.is_empty:
                line["input"] = given.text if isinstance(given, TextInput) else list(given.token_ids)
            line["output"] = "".join(piece.text for piece in turn.pieces)
        return {name: value for name, value in line.items() if value is not None}

    # ---- steps ---------------------------------------------------------------------------------------------------

    def stepped(self, num_rows: int, num_tokens: int, step_s: float) -> None:
        """A forward pass was made."""
        self.metrics.step_seconds.observe(step_s)
        self.metrics.step_rows.observe(num_rows)
        self.metrics.step_tokens.observe(num_tokens)

    def step_failed(self) -> None:
        """A forward pass raised."""
        self.metrics.step_failures.add()

    def step_stalled(self) -> None:
        """A step computed nothing though turns had tokens to compute."""
        self.metrics.stalled_steps.add()
        log.error("no turn gets its pages, and no copy is under way: the engine stands still")


def _is_health_turn(request: TurnRequest) -> bool:
    """Whether a turn opens a session only to close it: the supervisor asks so whether the server lives."""
    return request.start and request.end and request.input.is_empty


def _say(session: Session, event: str, **fields: Any) -> None:
    # Health turns open and close a session without tokens all the time: they are not logged.
    is_trial = session.is_closing and not len(session.context) and session.num_turns <= 1
    level = logging.DEBUG if is_trial else logging.INFO
    if sessions_log.isEnabledFor(level):
        named = {"session": str(session.id)} | ({} if session.tenant is None else {"tenant": session.tenant})
        sessions_log.log(level, event, extra={"fields": named | fields})
