"""Where turns arrive: they are checked and handed to the lifecycle, or refused.

What is refused here has cost no forward pass and changed no session.
"""

from __future__ import annotations

from dataclasses import replace

from microturn.engine.answers import to_client_error
from microturn.engine.lifecycle import Lifecycle
from microturn.errors import ContextFull, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from microturn.model.runner import Runner
from microturn.sessions.environment import SessionEnvironment
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput, least_input_len
from microturn.sessions.intake import check_number
from microturn.sessions.options import SessionOptions
from microturn.sessions.session import Session
from microturn.sessions.table import SessionTable, moved
from microturn.sessions.turn import Turn, TurnRequest
from microturn.settings import TENANT_HEADER, Settings
from microturn.telemetry.recorder import Recorder

# A negative id arrives as what it would be without its sign.
_END_OF_IDS = 2**63

_NO_OPTIONS = SessionOptions()


class RequestHandler:
    """Accepts turns, or refuses them.

    Attributes:
        is_leaving: whether the server opens no more sessions but branches, and restores none.
        is_draining: whether the server accepts no more turns.

    Args:
        settings: its limits.
        runner: the model that the turns are for.
        sessions: those that live.
        lifecycle: gets the turns that are accepted.
        environment: what sessions find here.
        recorder: counts repetitions.
    """

    def __init__(
        self,
        settings: Settings,
        runner: Runner,
        sessions: SessionTable,
        lifecycle: Lifecycle,
        environment: SessionEnvironment,
        recorder: Recorder,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._sessions = sessions
        self._lifecycle = lifecycle
        self.is_leaving = False
        self.is_draining = False
        self._environment = environment
        self._recorder = recorder

    def is_refused(self, request: TurnRequest) -> bool:
        """Whether it is known already that a turn will be refused, so that nothing need be fetched for it."""
        return self._goes_elsewhere(request) or request.refusal is not None

    def _goes_elsewhere(self, request: TurnRequest) -> bool:
        """Whether a server that stops takes a turn no more; while it hands sessions over, those that live go on.

        So do their branches: as long as a parent has a turn here, no other server can open one.
        """
        is_new = self.is_leaving and self._sessions.find(request.session_id) is None
        return self.is_draining or (is_new and not self._sessions.has_parent(request))

    def receive(self, turn: Turn) -> None:
        """Accepts a turn, or answers why not."""
        request = turn.request
        try:
            self._check_request(request)
            lives = self._sessions.find(request.session_id) is not None
            session = self._sessions.get(request.session_id, request) if lives or not request.opens else None
            if not request.opens and _says_more(request.session_options):
                raise InvalidArgument("resume goes on with what START has set: send no other option of the session")
            if session is not None and session.results.answer_repetition(
                request, session.open_turns, session.num_turns, max_waiting=self._settings.max_queued_turns
            ):
                session.last_activity_s = max(session.last_activity_s, request.arrived_s)
                self._lifecycle.attend(session)
                self._recorder.turn_repeated()
            elif session is None or request.opens:
                self._open(turn, replaces=lives)
            else:
                self._accept(session, turn)
        except Exception as error:
            turn.fail(to_client_error(error))
            if not isinstance(error, Unavailable):  # else END comes again where the session goes on
                self._lifecycle.close(turn)

    def _open(self, turn: Turn, *, replaces: bool) -> None:
        """A new session; one of the same id that lives gives way once the new one has proved itself valid."""
        options = turn.request.options
        if options.get("turn", 0) != 0:
            raise InvalidArgument("START is turn 0: go on with a session that lives by resume")
        if not replaces:
            self._sessions.check_room(self._settings, options.get("tenant"))
        parent = self._sessions.parent_of(turn.request)
        session = self._environment.open_session(turn, parent)
        try:
            self._lifecycle.open(session, turn)
        except Exception:
            session.drop_kv()
            raise

    def _accept(self, session: Session, turn: Turn) -> None:
        """A turn of a session that lives."""
        request = turn.request
        if session.is_closing:
            raise FailedPrecondition(f"session '{session.id}' is closing: open a new one with START")
        turn.resolve_options(session.defaults)
        check_number(session, turn, num_before=sum(not queued.is_keepalive for queued in session.queued))
        least_len = least_input_len(request.input, session.codec)
        if least_len > session.max_context:
            # It never fits: it is refused now, and does not wait in memory.
            raise ContextFull(f"the input has {least_len} tokens or more: max_context is {session.max_context}")
        if turn.interrupts and session.running is not None:
            self._lifecycle.interrupt(session, turn)
            return
        if len(session.queued) >= self._settings.max_queued_turns:
            raise ResourceExhausted(
                f"{len(session.queued)} turns wait in this session already: wait for an answer", retry_after_ms=200
            )
        self._lifecycle.enqueue(session, turn)

    def _check_request(self, request: TurnRequest) -> None:
        """Checks all of a turn that does not depend on its session.

        Raises:
            MicroturnError: why the turn must not run.
        """
        if self._goes_elsewhere(request):
            route = self._sessions.route_of(request)
            if route is not None:
                raise moved(route)
            raise Unavailable("the server is stopping: come back, or go elsewhere, with START and resume")
        if request.options.get("tenant") is not None and not self._settings.max_sessions_per_tenant:
            raise InvalidArgument(f"'{TENANT_HEADER}' is not read here: set max_sessions_per_tenant")
        if request.refusal is not None:
            raise request.refusal
        if isinstance(request.session_id, int) and request.session_id >= _END_OF_IDS:
            raise InvalidArgument("a session id is an integer in [1, 2^63), or a text of 1 to 128 bytes")
        vocab_size, hidden_size = self._runner.vocab_size, self._runner.hidden_size
        match request.input:
            case TokenInput(token_ids):
                if not all(0 <= token_id < vocab_size for token_id in token_ids):
                    raise InvalidArgument(f"input_ids are from 0 to {vocab_size - 1}")
            case EmbedInput(embeds):
                if not self._runner.accepts_embeds:
                    raise InvalidArgument("this model takes no input_embeds: send ids or text")
                if embeds.shape[1] != hidden_size:
                    raise InvalidArgument(f"input_embeds are [1, n, {hidden_size}], not [1, n, {embeds.shape[1]}]")
                if not bool(embeds.isfinite().all()):
                    raise InvalidArgument("input_embeds hold a value that is not finite")
            case TextInput():
                pass  # any text becomes tokens
        if any(token_id >= vocab_size for token_id in request.options.get("stop_token_ids", ())):
            raise InvalidArgument(f"stop_token_ids are from 0 to {vocab_size - 1}")
        if any(token_id >= vocab_size for token_id, _ in request.options.get("logit_bias", ())):
            raise InvalidArgument(f"the ids of logit_bias are from 0 to {vocab_size - 1}")
        asked, here = request.session_options.model_fingerprint, self._environment.model_fingerprint
        if request.opens and asked not in (None, here, self._environment.files_fingerprint):
            raise FailedPrecondition(
                f"the session is one of another model (fingerprint {asked}, here {here}): open it on a server of that "
                "model, or a new one"
            )


def _says_more(options: SessionOptions) -> bool:
    """Whether the options of a session say anything but `resume`."""
    return options != _NO_OPTIONS and replace(options, resume=False) != _NO_OPTIONS
