"""Where turns wait until what they need from elsewhere is here: the saved session that a START asks for, the ids of a
long text, the chat template with new tools, a compiled grammar. All of that is done beside the engine's thread.

    arrive ──▶ nothing needed, no turn of the session before it ─────────────────▶ receive
       └─────▶ first in the line of its session, needs something ──fetch──posted──▶ receive, then the next in line
       └─────▶ behind others in that line

So the turns of a session keep their order, and those of all others go on.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from weakref import ReferenceType, ref

from microturn.engine.answers import abandoned, to_client_error
from microturn.engine.lifecycle import Lifecycle
from microturn.engine.request_handler import RequestHandler
from microturn.engine.turn_grammars import TurnGrammars
from microturn.errors import MicroturnError, PermissionDenied, ResourceExhausted, Unavailable
from microturn.offload.background import Background
from microturn.offload.file_thread import Outcome
from microturn.sessions.deadlines import too_late
from microturn.sessions.inputs import TextInput
from microturn.sessions.options import TurnOptions
from microturn.sessions.table import SessionTable
from microturn.sessions.turn import SessionId, Turn, TurnRequest
from microturn.settings import Settings
from microturn.snapshots.arrivals import Arrivals
from microturn.text.codec import CodecFactory, PrepareText
from microturn.text.prepared_text import PreparedText

log = logging.getLogger(__name__)

# A text up to this length is tokenized when its turn's time has come, in half a millisecond (about 1 µs a character).
NUM_CHARS_AT_ONCE = 512

# How long a START waits for the directory of saved sessions.
LOOK_UP_S = 10.0


@dataclass(eq=False)
class _Line:
    """Turns of one session, of which the first is being prepared.

    Attributes:
        turns: those that wait, at least one.
        needs: what the first one still needs: each begins when the one before it is here.
        refused_end: a turn with END that was refused, not cancelled, while it waited: the session closes all the same.
    """

    turns: deque[Turn]
    needs: Iterator[bool]
    refused_end: Turn | None = None

    def refuse(self, turn: Turn, error: MicroturnError) -> None:
        """Answers a turn that will not be received, though its client is there."""
        turn.fail(error)
        if turn.request.end:
            self.refused_end = turn


class Preparation:
    """Gets turns ready, and hands them to the request_handler.

    Args:
        settings: how many turns may wait.
        sessions: those that live.
        request_handler: gets the turns.
        lifecycle: has those that were received.
        arrivals: looks for saved sessions.
        new_codec: learns the chat template with tools, as it makes a codec.
        prepare_text: makes ids of long text; None where all text is left to its turn's time.
        texts: does both.
        grammars: gives turns theirs.
        max_context: ids behind which a text is too long.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: Settings,
        sessions: SessionTable,
        request_handler: RequestHandler,
        lifecycle: Lifecycle,
        arrivals: Arrivals,
        new_codec: CodecFactory,
        prepare_text: PrepareText | None,
        texts: Background,
        grammars: TurnGrammars,
        *,
        max_context: int,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._sessions = sessions
        self._request_handler = request_handler
        self._lifecycle = lifecycle
        self._arrivals = arrivals
        self._new_codec = new_codec
        self._prepare_text = prepare_text
        self._texts = texts
        self._grammars = grammars
        self._max_context = max_context
        self._clock = clock
        self._lines: dict[SessionId, _Line] = {}
        # When turns in the lines are given up, and with what; some of them are no longer there.
        self._limits: list[tuple[float, int, ReferenceType[Turn], Callable[[], MicroturnError | None]]] = []
        self._numbers = count()

    @property
    def is_busy(self) -> bool:
        """Whether any turn waits here, or a session may be about to come."""
        return bool(self._lines) or self._arrivals.is_busy

    @property
    def next_s(self) -> float | None:
        """When `expire_turns` may have something to end, by the engine's clock."""
        return self._limits[0][0] if self._limits else None

    # ---- turns come and go ---------------------------------------------------------------------------------------

    def arrive(self, turn: Turn) -> None:
        """Takes a turn; sooner or later it is received, or answered."""
        line = self._lines.get(turn.request.session_id)
        if self._sessions.is_anothers(turn.request):
            self._request_handler.receive(turn)  # is refused: nothing is fetched, and the owner does not wait
        elif line is None:
            line = _Line(deque([turn]), self._needs(turn))
            self._lines[turn.request.session_id] = line
            self._go_on(line)
        elif len(line.turns) > self._settings.max_queued_turns:
            waiting = f"{len(line.turns) - 1} turns wait in this session already: wait for an answer"
            line.refuse(turn, ResourceExhausted(waiting, retry_after_ms=200))
        else:
            line.turns.append(turn)
            self._mind_deadline(turn)

    def has_turn_of(self, session_id: SessionId) -> bool:
        """Whether a turn of a session waits here: its client is not silent."""
        return session_id in self._lines

    def cancel(self, turn: Turn) -> None:
        """The client of a turn has gone: see `Lifecycle.cancel`."""
        line = self._line_of(turn)
        if line is None:
            self._lifecycle.cancel(turn)
        elif turn.is_numbered:
            turn.detach(turn.request.sink, abandoned())
        else:
            turn.fail(abandoned())
            self._dismiss(line, turn)

    def expire_turns(self) -> None:
        """Ends the turns that have waited too long."""
        now_s = self._clock()
        while self._limits and self._limits[0][0] <= now_s:
            _, _, entry, why = heapq.heappop(self._limits)
            turn = entry()
            line = None if turn is None else self._line_of(turn)
            error = why()
            if turn is not None and line is not None and error is not None:
                line.refuse(turn, error)
                self._dismiss(line, turn)

    def fail_all(self, error: MicroturnError) -> None:
        """Answers every turn that waits with an error; no saved session is restored any more."""
        self._arrivals.close()
        lines, self._lines = self._lines, {}
        for turn in chain.from_iterable(line.turns for line in lines.values()):
            turn.fail(error)

    def _line_of(self, turn: Turn) -> _Line | None:
        """The line that a turn waits in."""
        line = self._lines.get(turn.request.session_id)
        return line if line is not None and turn in line.turns else None

    def _dismiss(self, line: _Line, turn: Turn) -> None:
        """Takes a turn that was answered out of its line; what is being fetched for it is given up."""
        is_first = turn is line.turns[0]
        line.turns.remove(turn)
        if is_first:
            self._arrivals.give_up(turn.request.session_id)
            self._begin_next(turn, line)
            self._go_on(line)

    def _mind_deadline(self, turn: Turn) -> None:
        """Gives a turn that waits the options that it will have, as far as they are known, and minds its deadline."""
        turn.resolve_options(self._defaults(turn))
        if turn.deadline_s is not None:
            self._limit(turn, turn.deadline_s, too_late)

    def _limit(self, turn: Turn, at_s: float, why: Callable[[], MicroturnError | None]) -> None:
        heapq.heappush(self._limits, (at_s, next(self._numbers), ref(turn), why))

    # ---- what turns need -----------------------------------------------------------------------------------------

    def _go_on(self, line: _Line) -> None:
        """Goes on with the first in line, and with those behind it that need nothing."""
        while line.turns:
            turn = line.turns[0]
            try:
                if next(line.needs, False):
                    self._mind_deadline(turn)
                    return
            except Exception as error:
                line.turns.popleft()
                turn.fail(to_client_error(error))
            else:
                line.turns.popleft()
                self._request_handler.receive(turn)
            self._begin_next(turn, line)

    def _begin_next(self, turn: Turn, line: _Line) -> None:
        """A turn has left the first place of its line."""
        if line.turns:
            line.needs = self._needs(line.turns[0])
            return
        del self._lines[turn.request.session_id]
        if line.refused_end is not None:
            self._lifecycle.close(line.refused_end)

    def _resume(self, turn: Turn) -> None:
        """What a turn needed is here; it may have been answered meanwhile."""
        if (line := self._line_of(turn)) is not None:
            self._go_on(line)

    def _needs(self, turn: Turn) -> Iterator[bool]:
        """Begins to fetch what a turn needs, one after the other; each yield waits for `_resume`.

        Raises:
            MicroturnError: why the turn cannot be received.
        """
        request = turn.request
        if self._request_handler.is_refused(request):
            return
        if self._arrivals.may_come(request):
            yield from self._look_up(turn)
        if request.opens and request.session_options.tools:
            self._texts.submit(partial(self._new_codec, request.session_options.tools), lambda _: self._resume(turn))
            yield True
        given = request.input
        if self._prepare_text is not None and isinstance(given, TextInput) and len(given.text) > NUM_CHARS_AT_ONCE:
            parse_special = self._defaults(turn).updated(request.options).parse_special
            work = partial(self._prepare_text, given.text, parse_special, self._max_context)
            self._texts.submit(work, partial(self._has_prepared, turn))
            yield True
        if self._grammars.begin_fetch(turn, partial(self._tools, request), partial(self._resume, turn)):
            yield True

    def _look_up(self, turn: Turn) -> Iterator[bool]:
        request = turn.request
        outcome: list[Exception | None] = []

        def end(error: Exception | None) -> None:
            outcome.append(error)
            self._resume(turn)

        self._arrivals.ask(request, end)
        self._limit(turn, self._clock() + LOOK_UP_S, lambda: None if outcome else _no_answer(turn))
        yield True
        (error,) = outcome
        if error is None:
            return
        if not request.opens or isinstance(error, PermissionDenied):
            raise error
        log.warning("session %s begins anew, beside what is saved of it: %s", request.session_id, error)

    def _has_prepared(self, turn: Turn, outcome: Outcome[PreparedText]) -> None:
        if outcome.error is not None:
            log.error("a text is tokenized when its turn's time has come", exc_info=outcome.error)
        turn.prepared = outcome.value
        self._resume(turn)

    def _tools(self, request: TurnRequest) -> str | None:
        """Those of the session that a turn is for; None where it will be refused, or may not know them."""
        if request.opens and request.session_options.fork_of is None:
            return request.session_options.tools
        try:
            session = self._sessions.parent_of(request) if request.opens else self._sessions.find_owned(request)
        except MicroturnError:
            return None
        return None if session is None else session.codec.tools

    def _defaults(self, turn: Turn) -> TurnOptions:
        session = None if turn.request.opens else self._sessions.find(turn.request.session_id)
        return session.defaults if session else TurnOptions()


def _no_answer(turn: Turn) -> Unavailable:
    return Unavailable(
        f"whether session '{turn.request.session_id}' is saved could not be read within {LOOK_UP_S:g} s: try again",
        retry_after_ms=1000,
    )
