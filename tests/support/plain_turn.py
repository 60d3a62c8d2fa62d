"""A turn in plain lists: what a client asked, and the one thing that it must be told.

Knows the wire contract and no engine: no pages, no batches, no threads. See `plain_engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from microturn.kv.window import Window
from microturn.sessions.options import TurnOptions, grammar_source
from microturn.sessions.turn import SessionId, Turn
from microturn.text.answer_grammar import AnswerGrammar
from support.driver import Recorder
from support.grammars import hash_grammars
from support.plain_choice import Token, plain_answer

MAX_CONTEXT = 40
# Tokens that end a generation.
EOS_IDS = frozenset(range(0, 96, 12))
WINDOW = Window(num_sinks=4, length=9, slack=4)


@dataclass(frozen=True)
class Limits:
    """What a server allows.

    Attributes:
        window: of a session that asks for one; None where it leaves no room for a turn.
    """

    max_context: int = MAX_CONTEXT
    max_sessions: int = 4
    max_queued: int = 3
    idle_s: float = 10.0
    eos_ids: frozenset[int] = EOS_IDS
    window: Window | None = WINDOW


class Refused(Exception):
    """A turn must not run, and changes nothing."""

    def __init__(self, code: str, **details: int) -> None:
        super().__init__(code)
        self.ending = Ending(code=code, details=details)


@dataclass(frozen=True)
class Ask:
    """What a client sends, by the names of the contract; None is what it leaves unsaid.

    Attributes:
        sampling: how its tokens are chosen, by name.
        others: all else that it says, which changes no context.
        is_of_session: it says something that START alone may say.
        refusal: the code that it is refused with for what it says alone.
    """

    session_id: SessionId
    given: tuple[Token, ...] = ()
    max_tokens: int = 0
    start: bool = False
    end: bool = False
    resume: bool = False
    turn: int | None = None
    rewind_to: int | None = None
    on_overlap: str | None = None
    deadline_ms: float | None = None
    session_key: str | None = None
    is_windowed: bool = False
    fork_of: SessionId | None = None
    seed: int | None = None
    sampling: tuple[tuple[str, Any], ...] = ()
    others: tuple[tuple[str, Any], ...] = ()
    is_of_session: bool = False
    refusal: str = ""

    @property
    def opens(self) -> bool:
        return self.start and not self.resume

    def on_top_of(self, parent: Self) -> Self:
        """What a branch has for defaults: what its START says, and else what its parent had."""
        return replace(
            self,
            on_overlap=parent.on_overlap if self.on_overlap is None else self.on_overlap,
            deadline_ms=parent.deadline_ms if self.deadline_ms is None else self.deadline_ms,
            seed=parent.seed if self.seed is None else self.seed,
            sampling=tuple({**dict(parent.sampling), **dict(self.sampling)}.items()),
        )

    @property
    def is_silent(self) -> bool:
        """Whether it brings nothing and wants nothing generated; the session's defaults do not make it speak."""
        return not self.given and not self.max_tokens

    @property
    def is_keepalive(self) -> bool:
        """Whether it takes no number."""
        says = (self.end, self.on_overlap == "interrupt", self.rewind_to is not None, self.turn is not None)
        return self.is_silent and not any(says)

    @property
    def content(self) -> Self:
        """What makes it the same turn when it comes again: all but how it is delivered."""
        return replace(self, start=False, resume=False, deadline_ms=None, session_key=None)

    @property
    def options(self) -> dict[str, Any]:
        """What it says of itself on the wire."""
        said = {name: getattr(self, name) for name in ("turn", "rewind_to", "on_overlap", "deadline_ms", "session_key")}
        flags: dict[str, Any] = {"resume": True} if self.resume else {}
        if self.is_windowed and self.opens:
            flags = {"overflow": "window", "sink_tokens": WINDOW.num_sinks, "window_tokens": WINDOW.length}
        return {name: value for name, value in said.items() if value is not None} | flags | dict(self.others)


@dataclass
class Sight:
    """What a session's tokens see of it.

    Attributes:
        limits: of the server.
        window: the rule; None is all that came before.
        least_rewind: the first position that can be gone back to.
    """

    limits: Limits = field(default_factory=Limits)
    window: Window | None = None
    least_rewind: int = 0

    @property
    def room(self) -> int | None:
        """Tokens that a turn may bring and say; None where only the context has an end."""
        return None if self.window is None else self.limits.max_context - self.window.max_kept

    def lose(self, committed_len: int) -> None:
        """Nobody will go back behind this length by more than the slack."""
        if self.window is not None:
            shortest = self.window.shortest_without(self.window.droppable(committed_len))
            self.least_rewind = max(self.least_rewind, shortest)


@dataclass(frozen=True)
class Told:
    """What a session is made of: tokens, and the turns that brought them."""

    tokens: tuple[Token, ...] = ()
    num_turns: int = 0
    sight: Sight = field(default_factory=Sight)

    def take_in(self, turn: PlainTurn, max_tokens: int) -> tuple[Told, Told]:
        """What is left where the turn cuts, and that with the turn's input.

        Raises:
            Refused: it must not run.
        """
        ask, end = turn.ask, len(self.tokens)
        if ask.turn not in (None, self.num_turns):
            raise Refused("FAILED_PRECONDITION", turn=self.num_turns)
        cut_at = end if ask.rewind_to is None else ask.rewind_to
        if cut_at > end and not turn.interrupts:
            raise Refused("FAILED_PRECONDITION", position=end)
        if ask.rewind_to is not None and cut_at < self.sight.least_rewind:
            raise Refused("FAILED_PRECONDITION", position=self.sight.least_rewind)
        left = replace(self, tokens=self.tokens[:cut_at])
        tokens = left.tokens + ask.given
        if max_tokens and not tokens:
            raise Refused("INVALID_ARGUMENT")
        room = self.sight.limits.max_context - len(left.tokens) if self.sight.room is None else self.sight.room
        if len(ask.given) + max_tokens > room:
            raise Refused("CONTEXT_FULL", room=max(0, room - len(ask.given)))
        return left, Told(tokens, self.num_turns + (not ask.is_keepalive), self.sight)


@dataclass(frozen=True)
class Ending:
    """How a turn ends towards its client: with an error's code and details, or with a reason in its status."""

    code: str = ""
    details: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    context_len: int = 0
    replayed: bool = False


@dataclass(eq=False)
class PlainTurn:
    """A turn that was posted.

    Attributes:
        ask: what was asked.
        turn: the engine's object for it.
        recorder: what its client was told.
        recorders: those of all whom it answers: repetitions join it, and who leaves is told no more.
        arrived_s: when it was posted.
        interrupts: whether it ends those before it.
        deadline_s: when it must be done.
        undone: what the session is made of if the turn is undone; None while it waits.
        told: what the session is made of once the turn's input is in.
        options: how its tokens are chosen.
        seed: likewise.
        answer: all that the turn would say if nobody stopped it.
        answer_ends: why it would end then.
        num_answered: how much of that it has said.
        ending: what its clients must be told at the end; None is nothing yet.
    """

    ask: Ask
    turn: Turn
    recorder: Recorder
    arrived_s: float
    recorders: list[Recorder] = field(default_factory=list)
    interrupts: bool = False
    deadline_s: float | None = None
    undone: Told | None = None
    told: Told | None = None
    options: TurnOptions = field(default_factory=TurnOptions)
    seed: int = 0
    answer: list[int] = field(default_factory=list)
    answer_ends: str = "length"
    num_answered: int = 0
    ending: Ending | None = None

    def __post_init__(self) -> None:
        self.recorders.append(self.recorder)

    def inherit(self, defaults: Ask) -> None:
        """Takes from the session's START what the turn leaves unsaid."""
        ask = self.ask
        on_overlap = ask.on_overlap if ask.on_overlap or ask.is_silent else defaults.on_overlap
        self.interrupts = on_overlap == "interrupt"
        deadline_ms = defaults.deadline_ms if ask.deadline_ms is None else ask.deadline_ms
        self.deadline_s = self.arrived_s + deadline_ms / 1e3 if deadline_ms else None
        self.options = TurnOptions(**{**dict(defaults.sampling), **dict(ask.sampling)})
        self.seed = (defaults.seed or 0) if ask.seed is None else ask.seed

    def is_late(self, now_s: float) -> bool:
        return self.deadline_s is not None and self.deadline_s <= now_s

    def check_time(self, now_s: float) -> None:
        """Refuses a turn that has not begun by its deadline."""
        if self.is_late(now_s):
            raise Refused("DEADLINE_EXCEEDED")

    def begin(self, undone: Told, told: Told, max_tokens: int) -> None:
        """Its input is in, behind what is left of the session; what it would say follows from the tokens alone."""
        self.undone, self.told = undone, told
        told.sight.lose(len(told.tokens) - len(self.ask.given))
        source = grammar_source({"max_tokens": max_tokens})
        grammars = hash_grammars(told.sight.limits.eos_ids)
        grammar = None if source is None else AnswerGrammar((grammars.compile(source),))
        self.answer, self.answer_ends = plain_answer(
            told.tokens, max_tokens, self.options, self.seed, told.sight.limits.eos_ids, told.sight.window, grammar
        )

    @property
    def left(self) -> Told:
        """What the session is made of with all that the turn has brought and said."""
        assert self.told is not None
        return replace(self.told, tokens=self.told.tokens + tuple(self.answer[: self.num_answered]))

    @property
    def reason(self) -> str:
        """Why it ends if nobody stops it."""
        if not self.ask.max_tokens:
            return "append"
        return self.answer_ends

    @property
    def has_nothing_to_compute(self) -> bool:
        """Whether it ends as soon as it begins: the last token of a context is computed with the next one."""
        assert self.told is not None
        return not self.ask.max_tokens and (not self.ask.given or len(self.told.tokens) == 1)

    def repeat(self, earlier: PlainTurn) -> None:
        """It is another turn come again: it is told what that one was told, or is being told."""
        if earlier.ending is None:
            earlier.recorders.append(self.recorders.pop())
            return
        self.undone, self.told = earlier.undone, earlier.told
        self.answer, self.num_answered = earlier.answer, earlier.num_answered
        self.ending = replace(earlier.ending, replayed=True)

    def check(self) -> None:
        """Asserts that its clients were told what they must be told by now, and no more."""
        for recorder in self.recorders:
            assert recorder.token_ids == self.answer[: self.num_answered]
            self._check_positions(recorder)
            if self.ending is None:
                assert not recorder.is_done, f"it must not have ended: {recorder}"
            elif self.ending.code:
                assert recorder.error is not None, f"it must be refused with {self.ending}: {recorder}"
                assert (recorder.error.code, recorder.error.details) == (self.ending.code, self.ending.details)
            else:
                self._check_status(self.ending, recorder)

    def _check_positions(self, recorder: Recorder) -> None:
        position = 0 if self.told is None else len(self.told.tokens)
        for output in recorder.outputs:
            assert not output.token_ids or output.position == position
            position += len(output.token_ids)

    def _check_status(self, ending: Ending, recorder: Recorder) -> None:
        assert recorder.is_done, f"it must have ended with {ending}: {recorder}"
        status = recorder.status
        told = (status.finish_reason, status.context_len, status.replayed)
        assert told == (ending.reason, ending.context_len, ending.replayed)
        if self.undone is not None:
            assert status.turn == self.undone.num_turns
            assert status.usage["input_tokens"] == len(self.ask.given)
            assert status.usage["output_tokens"] == self.num_answered
