"""Where turns arrive: whose they are, whether they came before, whether there is room; then they are in the lifecycle's
hands. What is refused here has cost no forward pass and touched no session.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import replace
from typing import Any

from microturn.admission import check_room
from microturn.checks import check_request
from microturn.errors import ContextFull, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from microturn.history import History
from microturn.intake import take_in
from microturn.lifecycle import Lifecycle, told
from microturn.options import OF_ONE_TURN, TENANT_HEADER, SessionOptions, TurnOptions
from microturn.ownership import KeyHash, check_owner, is_owner
from microturn.results import Results, check_same, content_of
from microturn.runner import Runner
from microturn.session import Session
from microturn.session_table import SessionTable
from microturn.settings import Settings
from microturn.snapshots.session_state import Host
from microturn.snapshots.snapshot import next_epoch
from microturn.telemetry.recorder import Recorder
from microturn.tiers.beat import Beat
from microturn.token_counts import TokenCounts
from microturn.turn import Turn, TurnRequest, least_input_len
from microturn.window import DEFAULT_SINKS, Window


class Reception:
    """Takes turns in, or refuses them.

    Attributes:
        is_draining: whether the server takes no more turns.

    Args:
        settings: its limits.
        runner: the model that the turns are for.
        sessions: those that live.
        lifecycle: gets the turns that are accepted.
        host: what sessions find here.
        recorder: is told which turns came before.
    """

    def __init__(
        self,
        settings: Settings,
        runner: Runner,
        sessions: SessionTable,
        lifecycle: Lifecycle,
        host: Host,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._sessions = sessions
        self._lifecycle = lifecycle
        self.is_draining = False
        self._host = host
        self._recorder = recorder

    def is_refused(self, request: TurnRequest) -> bool:
        """Whether it is known already that a turn will be refused, so that nothing need be fetched for it."""
        return self.is_draining or request.refusal is not None

    def receive(self, turn: Turn) -> None:
        """Takes a turn, or answers why not."""
        try:
            if self.is_draining:
                raise Unavailable("the server is stopping: come back, or go elsewhere, with START and resume")
            self._check_tenant(turn.request)
            check_request(turn.request, self._runner)
            if turn.request.opens:
                self._open(turn)
            else:
                self._take(self._sessions.get(turn.request.session_id, turn.request), turn)
        except Exception as error:
            turn.fail(told(error))
            self.close_refused(turn)

    # ---- START ---------------------------------------------------------------------------------------------------

    def _open(self, turn: Turn) -> None:
        """A new session; one of the same id that lives gives way once the new one has proved itself valid."""
        request = turn.request
        self._check_model(request.session_options)
        replaced = self._sessions.find(request.session_id)
        if replaced is not None:
            check_owner(replaced, request)
            if self._is_repetition(replaced, turn):
                return
        if request.options.get("turn", 0) != 0:
            raise InvalidArgument("START is turn 0: go on with a session that lives by resume")
        if replaced is None:
            check_room(self._settings, self._sessions, request.options.get("tenant"))
        parent = self._parent(request)
        session = self._new_session(request) if parent is None else self._branch(request, parent)
        turn.options = replace(session.defaults, **request.options)
        take_in(session, turn, max_tokens=turn.max_tokens)
        if parent is not None:
            session.share_kv_of(parent, turn.len_before)
        try:
            self._lifecycle.open(session, turn)
        except Exception:
            session.drop_kv()
            raise

    def _new_session(self, request: TurnRequest) -> Session:
        asked = request.session_options
        defaults, seed = _defaults(request)
        max_context = self._max_context_for(asked, self._host.max_context)
        window = self._window_for(asked, max_context)
        return Session(
            id=request.session_id,
            history=History(self._host.new_codec(asked.tools)),
            table=self._host.new_table(window),
            defaults=replace(TurnOptions(), **defaults),
            seed=secrets.randbits(63) if seed is None else seed,
            max_context=max_context,
            window=window,
            history_limit=self._host.history_limit(keeps_all=asked.history == "whole"),
            idle_timeout_s=asked.idle_timeout_s or self._settings.idle_timeout_s,
            last_activity_s=request.arrived_s,
            results=Results(capacity=self._settings.max_queued_turns + 1),
            key=KeyHash.of(request.options.get("session_key")),
            tenant=request.options.get("tenant"),
            opened_s=request.arrived_s,
            epoch=next_epoch(),
            cache_salt=asked.cache_salt if self._settings.share_prefixes else None,
            priority=asked.session_priority,
        )

    def _parent(self, request: TurnRequest) -> Session | None:
        asked = request.session_options.fork_of
        if asked is None:
            return None
        parent = self._sessions.get(self._sessions.id_named(asked), request)
        if parent.id == request.session_id:
            raise InvalidArgument("a session is not forked into itself: give the branch an id of its own")
        return parent

    def _branch(self, request: TurnRequest, parent: Session) -> Session:
        """A session that goes on, by itself, from the last committed point of another."""
        asked = request.session_options
        window_options = (asked.overflow, asked.sink_tokens, asked.window_tokens, asked.history)
        if asked.tools or asked.cache_salt or any(option is not None for option in window_options):
            raise InvalidArgument(
                "a branch has the tools, the prefix and the window of its parent: send no tools, no cache_salt, no "
                "overflow, sink_tokens, window_tokens or history"
            )
        defaults, seed = _defaults(request)
        return replace(
            parent,
            id=request.session_id,
            history=parent.fork_history(),
            table=self._host.new_table(parent.window),
            defaults=replace(parent.defaults, **defaults),
            seed=parent.seed if seed is None else seed,
            max_context=self._max_context_for(asked, parent.max_context),
            idle_timeout_s=asked.idle_timeout_s or parent.idle_timeout_s,
            last_activity_s=request.arrived_s,
            results=Results(capacity=self._settings.max_queued_turns + 1),
            cache_salt=None,
            opened_s=request.arrived_s,
            origin="fork",
            epoch=next_epoch(),
            stored=None,
            counts=TokenCounts(),
            beat=Beat(),
            priority=asked.session_priority or parent.priority,
            running=None,
            queued=deque(),
            num_turns=0,
            is_closing=False,
        )

    def _check_model(self, asked: SessionOptions) -> None:
        """A context that was built with one model is not told to another."""
        here = self._host.model_fingerprint
        if asked.model_fingerprint not in (None, here):
            raise FailedPrecondition(
                f"the session is one of another model (fingerprint {asked.model_fingerprint}, here {here}): open it "
                "on a server of that model, or a new one"
            )

    def _max_context_for(self, asked: SessionOptions, default: int) -> int:
        if asked.max_context is None:
            return default
        if asked.max_context > self._host.max_context:
            raise InvalidArgument(f"option 'max_context' is at most {self._host.max_context} here")
        return asked.max_context

    def _window_for(self, asked: SessionOptions, max_context: int) -> Window | None:
        if asked.overflow != "window":
            if any(option is not None for option in (asked.sink_tokens, asked.window_tokens, asked.history)):
                raise InvalidArgument("sink_tokens, window_tokens and history come with overflow=window")
            return None
        if self._runner.no_window_reason is not None:
            raise InvalidArgument(f"overflow=window is not exact with this model: {self._runner.no_window_reason}")
        window = Window.of_whole_pages(
            DEFAULT_SINKS if asked.sink_tokens is None else asked.sink_tokens,
            asked.window_tokens or max_context // 2,
            self._settings.window_slack,
            page_size=self._host.pool.page_size,
        )
        if window.max_kept >= max_context:
            raise InvalidArgument(
                f"{window.num_sinks} sinks, {window.length} tokens of window and twice {window.slack} of slack leave "
                f"no room for a turn: max_context is {max_context}"
            )
        return window

    # ---- turns of a session that lives ---------------------------------------------------------------------------

    def _take(self, session: Session, turn: Turn) -> None:
        request = turn.request
        if replace(request.session_options, resume=False) != SessionOptions():
            raise InvalidArgument("resume goes on with what START has set: send no other option of the session")
        if self._is_repetition(session, turn):
            return
        if session.is_closing:
            raise FailedPrecondition(f"session '{session.id}' is closing: open a new one with START")
        turn.options = replace(session.defaults, **request.options)
        _check_number(session, turn)
        least_len = least_input_len(request.input, session.codec)
        if least_len > session.max_context:
            # It never fits, so it need not wait to be told so, in memory.
            raise ContextFull(f"the input has {least_len} tokens or more: max_context is {session.max_context}")
        if turn.interrupts and session.running is not None:
            self._lifecycle.interrupt(session, turn)
            return
        if len(session.queued) >= self._settings.max_queued_turns:
            raise ResourceExhausted(
                f"{len(session.queued)} turns wait in this session already: wait for an answer", retry_after_ms=200
            )
        self._lifecycle.enqueue(session, turn)

    def _is_repetition(self, session: Session, turn: Turn) -> bool:
        """Answers a turn that came before: from its record, or together with the one that is not done yet.

        Raises:
            InvalidArgument: its number is that of another turn.
            FailedPrecondition: it came long ago.
        """
        request = turn.request
        number = request.options.get("turn")
        if number is None:
            return False
        for earlier in session.open_turns:
            if earlier.is_numbered and earlier.options.turn == number:
                check_same(request, content_of(earlier.request))
                if len(earlier.sinks) > self._settings.max_queued_turns:
                    raise ResourceExhausted(f"{len(earlier.sinks)} clients wait for turn {number}", retry_after_ms=200)
                self._recorder.turn_repeated()
                earlier.attach(request.sink)
                session.last_activity_s = max(session.last_activity_s, request.arrived_s)
                return True
        answer = session.results.find(request)
        if answer is not None:
            self._recorder.turn_repeated()
            session.last_activity_s = max(session.last_activity_s, request.arrived_s)
            request.sink.put(answer)
            return True
        if number < session.num_turns:
            raise FailedPrecondition(
                f"the answer to turn {number} is not kept any more: go on with turn {session.num_turns}",
                turn=session.num_turns,
            )
        return False

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check_tenant(self, request: TurnRequest) -> None:
        if request.options.get("tenant") is not None and not self._settings.max_sessions_per_tenant:
            raise InvalidArgument(f"'{TENANT_HEADER}' is not read here: set max_sessions_per_tenant")

    def close_refused(self, turn: Turn) -> None:
        """END closes its session even when its turn is refused, but for who may not speak for the session."""
        session = self._sessions.find(turn.request.session_id)
        if session is not None and turn.request.end and not turn.request.opens and is_owner(session, turn.request):
            turn.options = replace(session.defaults, **turn.request.options)
            self._lifecycle.close(session, at_once=turn.interrupts)


def _defaults(request: TurnRequest) -> tuple[dict[str, Any], int | None]:
    """What START says for all turns of its session, and the seed."""
    defaults = {name: value for name, value in request.options.items() if name not in OF_ONE_TURN}
    return defaults, defaults.pop("seed", None)


def _check_number(session: Session, turn: Turn) -> None:
    """A numbered turn follows on those that were accepted before it."""
    expected = session.num_turns + sum(not waiting.is_keepalive for waiting in session.queued)
    if turn.is_numbered and turn.options.turn != expected:
        raise FailedPrecondition(f"turn {expected} comes before turn {turn.options.turn}", turn=expected)
