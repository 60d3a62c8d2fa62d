"""A session in plain lists: what it is made of, and the turns that have not ended.

Nothing is undone here: a turn that must not run is tried on values that are thrown away. See `plain_engine`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from microturn.sessions.turn import Turn
from support.plain_turn import Ask, Ending, Limits, PlainTurn, Refused, Sight, Told

MAX_QUEUED = 3
IDLE_S = 10.0


class LatestClock:
    """A clock, and the latest time that it ever showed: it may be set back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.latest_s = clock()

    def __call__(self) -> float:
        now_s = self._clock()
        self.latest_s = max(self.latest_s, now_s)
        return now_s


@dataclass(eq=False)
class PlainSession:
    """A session.

    Attributes:
        defaults: what its START said.
        limits: of the server.
        clock: the engine's.
        last_activity_s: when either side was last heard of.
        expired_s: when it must have expired. A clock that is set back may make that later than its idle time.
        told: what the turns that have ended left.
        open: the turns that have not ended, the running one first.
        results: numbered turns that ended well, the last few.
        is_held: it is being saved to go on elsewhere, and no turn is begun.
    """

    defaults: Ask
    clock: LatestClock
    last_activity_s: float
    limits: Limits = field(default_factory=Limits)
    expired_s: float = 0.0
    told: Told = field(default_factory=Told)
    open: list[PlainTurn] = field(default_factory=list)
    results: dict[int, PlainTurn] = field(default_factory=dict)
    is_closing: bool = False
    is_held: bool = False

    def __post_init__(self) -> None:
        self.told = Told(sight=Sight(self.limits, self.limits.window if self.defaults.is_windowed else None))
        self._touch(self.last_activity_s)

    @property
    def key(self) -> str | None:
        return self.defaults.session_key

    @property
    def now(self) -> Told:
        """What it is made of, with the running turn's input and what was answered so far."""
        return self.open[0].left if self.runs else self.told

    @property
    def runs(self) -> bool:
        """Whether its first open turn has begun."""
        return bool(self.open) and self.open[0].told is not None

    @property
    def queued(self) -> list[PlainTurn]:
        """The open turns that have not begun."""
        return self.open[1:] if self.runs else self.open

    # ---- turns come ------------------------------------------------------------------------------------------------

    def is_repetition(self, turn: PlainTurn) -> bool:
        """Answers a turn that came before, by its number.

        Raises:
            Refused: the number was another turn's, or is one of long ago.
        """
        number = turn.ask.turn
        if number is None:
            return False
        for earlier in (*self.open, *self.results.values()):
            if earlier.ask.turn == number:
                if earlier.ask.content != turn.ask.content:
                    raise Refused("INVALID_ARGUMENT")
                if earlier.ending is None and len(earlier.recorders) > self.limits.max_queued:
                    raise Refused("RESOURCE_EXHAUSTED", retry_after_ms=200)
                turn.repeat(earlier)
                self._touch(max(self.last_activity_s, turn.arrived_s))
                return True
        if number < self.now.num_turns:
            raise Refused("FAILED_PRECONDITION", turn=self.now.num_turns)
        return False

    def receive(self, turn: PlainTurn) -> None:
        """Takes a turn that is new.

        Raises:
            Refused: nobody is ended, and nothing is changed.
        """
        if self.is_closing:
            raise Refused("FAILED_PRECONDITION")
        if turn.ask.turn not in (None, self.next_number):
            raise Refused("FAILED_PRECONDITION", turn=self.next_number)
        if len(turn.ask.given) > self.limits.max_context:
            raise Refused("CONTEXT_FULL")
        if turn.interrupts and self.runs:
            self._interrupt(turn)
        elif len(self.queued) >= self.limits.max_queued:
            raise Refused("RESOURCE_EXHAUSTED", retry_after_ms=200)
        else:
            self.accept(turn)
        self.advance()

    @property
    def next_number(self) -> int:
        return self.now.num_turns + sum(not turn.ask.is_keepalive for turn in self.queued)

    def accept(self, turn: PlainTurn) -> None:
        self._touch(max(self.last_activity_s, turn.arrived_s))
        self.is_closing = turn.ask.end
        self.open.append(turn)

    def _interrupt(self, turn: PlainTurn) -> None:
        """What runs ends where it is, what waits is appended and not answered; then comes the turn's own cut."""
        turn.check_time(self.clock())
        appended, fates = self._append_queued()
        left, told = appended.take_in(turn, turn.ask.max_tokens)
        self._end_open(left, fates)
        self.accept(turn)
        turn.begin(left, told, turn.ask.max_tokens)

    def close(self, *, at_once: bool) -> None:
        """END came with a turn that is refused."""
        self.is_closing = True
        if at_once and self.runs:
            self._end_open(*self._append_queued())

    # ---- turns run -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Begins the turns whose time has come, up to one that has something to compute."""
        while self.open:
            turn = self.open[0]
            if turn.told is None and self.is_held:
                return
            if turn.told is None:
                try:
                    turn.check_time(self.clock())
                    _, told = self.told.take_in(turn, turn.ask.max_tokens)
                except Refused as refusal:
                    self._drop(turn, refusal.ending)
                    continue
                turn.begin(self.told, told, turn.ask.max_tokens)
            if not turn.has_nothing_to_compute:
                return
            self._finish("append")
        self.told.sight.lose(len(self.told.tokens))

    def listen(self, real_open: list[Turn], *, pass_failed: bool) -> bool:
        """Hears how far the running turn has come.

        Args:
            real_open: the turns that the engine has still to answer.
            pass_failed: whether a forward pass raised just now.

        Returns:
            Whether the turn failed with the pass.
        """
        if not self.runs:
            return False
        turn = self.open[0]
        turn.num_answered = turn.turn.num_output
        is_gone = turn.turn not in real_open
        if is_gone and pass_failed:
            self._drop(turn, Ending(code="INTERNAL"))
        elif turn.num_answered == len(turn.answer) if turn.ask.max_tokens else is_gone:
            self._finish(turn.reason)
        self.advance()
        return is_gone and pass_failed

    # ---- turns end -------------------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether it would generate for nobody."""
        if not self.runs or self.is_closing or any(turn.recorders for turn in self.open):
            return False
        return bool(self.open[0].ask.max_tokens) and not self.open[0].ask.end

    def leave(self, turn: PlainTurn) -> None:
        """A turn's client goes: the turn is undone whole; a numbered one waits for who asks again."""
        was_paused = self.is_paused
        if turn.ask.turn is not None:
            for open_turn in self.open:
                open_turn.recorders = [other for other in open_turn.recorders if other is not turn.recorder]
        elif turn in self.open:
            self._undo_end(turn)
            self._drop(turn, Ending(reason="cancelled"))
            self.advance()
        if self.is_paused and not was_paused:
            self._touch(self.clock())

    def end_late_turns(self) -> None:
        """Deadlines pass."""
        now_s = self.clock()
        for turn in [turn for turn in self.queued if turn.is_late(now_s)]:
            self._drop(turn, Ending(code="DEADLINE_EXCEEDED"))
        if self.runs and self.open[0].is_late(now_s):
            self._finish("deadline")
            self.advance()

    def undo_all(self, ending: Ending) -> None:
        """The server stops: nothing stays of the turns that are not done."""
        for turn in reversed(list(self.open)):
            self._undo_end(turn)
            self._drop(turn, ending)

    def _undo_end(self, turn: PlainTurn) -> None:
        self.is_closing = self.is_closing and (turn.ask.opens or not turn.ask.end)

    def restored(self, clock: LatestClock) -> PlainSession:
        """The session as it is taken up from a file."""
        session = PlainSession(self.defaults, clock, clock(), self.limits)
        session.told, session.results = self.told, dict(self.results)
        return session

    def reset(self) -> None:
        """START begins the session anew."""
        for turn in self.open:
            turn.ending = Ending(reason="cancelled", context_len=len(self.now.tokens))

    def _finish(self, reason: str) -> None:
        """The running turn ends well."""
        turn = self.open.pop(0)
        self.told = turn.left
        if turn.ask.is_silent and turn.ask.end:
            reason = "closed"
        self._end_well(turn, reason, len(self.told.tokens))

    def _drop(self, turn: PlainTurn, ending: Ending) -> None:
        """A turn ends, and nothing of it stays."""
        if turn.told is not None:
            assert turn.undone is not None
            self.told = turn.undone
            self._touch(self.clock())
        self.open.remove(turn)
        turn.ending = replace(ending, context_len=len(self.now.tokens))

    def _append_queued(self) -> tuple[Told, dict[PlainTurn, Told | Ending]]:
        """What the session is made of once what waits is appended; and of each turn: appended to what, or why not."""
        told = self.now
        fates: dict[PlainTurn, Told | Ending] = {}
        for turn in self.open[1:]:
            try:
                fates[turn], (_, told) = told, told.take_in(turn, 0)
            except Refused as refusal:
                fates[turn] = refusal.ending
        return told, fates

    def _end_open(self, left: Told, fates: dict[PlainTurn, Told | Ending]) -> None:
        """All open turns end as interrupted, but for those that could not be appended, and this is left."""
        turns, self.open, self.told = self.open, [], left
        for turn in turns:
            fate = fates.get(turn, turn.undone)
            if isinstance(fate, Ending):
                turn.ending = fate
            else:
                turn.undone = fate
                self._end_well(turn, "interrupted", len(left.tokens))

    def _end_well(self, turn: PlainTurn, reason: str, context_len: int) -> None:
        self._touch(self.clock())
        turn.ending = Ending(reason=reason, context_len=context_len)
        if turn.ask.turn is not None:
            self.results[turn.ask.turn] = turn
            if len(self.results) > self.limits.max_queued + 1:
                del self.results[min(self.results)]

    def _touch(self, now_s: float) -> None:
        self.last_activity_s = now_s
        self.expired_s = max(now_s, self.clock.latest_s) + self.limits.idle_s
