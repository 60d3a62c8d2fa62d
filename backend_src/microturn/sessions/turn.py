"""A turn: what a client asked for, what it becomes while it runs, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

from microturn.errors import MicroturnError
from microturn.sessions.history import Checkpoint
from microturn.sessions.inputs import TurnInput
from microturn.sessions.options import SessionOptions, TurnOptions
from microturn.text.answer_grammar import AnswerGrammar, AnswerMatcher
from microturn.text.prepared_text import PreparedText

SessionId = int | str

# The time of a micro-turn. A turn without a deadline is due one beat after it came.
BEAT_S = 0.2


@dataclass(frozen=True)
class Status:
    """How a turn ended; the fields of `status` in the wire contract, which says what they mean."""

    finish_reason: str
    stop_reason: int | str | None
    turn: int
    context_len: int
    kept_len: int
    usage: Mapping[str, int]
    timing_ms: Mapping[str, float]
    expires_in_s: float
    seed: int
    model_fingerprint: str | None = None
    replayed: bool = False
    rebuilt: bool = False


# A tuple, since each token makes one: a frozen dataclass takes four times as long to make.
class TurnOutput(NamedTuple):
    """A piece of a turn's answer.

    Attributes:
        token_ids: new tokens.
        text: text that has become certain.
        position: absolute position of the first new token; without tokens it has no meaning.
        logprobs: of the new tokens, when asked for.
        status: on the last piece only.
        appended_ids: on the last piece, when asked for: the ids that the input became.
        top_logprobs: for each new token the likeliest ids with theirs, the likeliest first, when asked for.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    position: int = 0
    logprobs: tuple[float, ...] = ()
    status: Status | None = None
    appended_ids: tuple[int, ...] | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        """Pieces of one answer, in their order and at least one, as one piece."""
        if len(pieces) == 1:  # as nearly each piece of a streamed answer is
            return pieces[0]
        return cls(
            token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
            text="".join(piece.text for piece in pieces),
            position=next((piece.position for piece in pieces if piece.token_ids), 0),
            logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
            status=pieces[-1].status,
            appended_ids=pieces[-1].appended_ids,
            top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
        )


class TurnSink(Protocol):
    """Where a turn's answer goes. Called on the engine's thread: it hands on and returns.

    Exactly one of these ends a turn: an output with a status, or an error.
    """

    def put(self, output: TurnOutput) -> None: ...

    def fail(self, error: MicroturnError) -> None: ...


@dataclass(frozen=True)
class TurnRequest:
    """A turn as it arrived, its options already checked.

    Attributes:
        options: the turn options that were given, by name.
        session_options: what came with START.
        refusal: why the turn must not run, known before it came here. It travels on because its END still closes.
        arrived_s: when it arrived, by the engine's clock.
    """

    session_id: SessionId
    input: TurnInput
    sink: TurnSink
    arrived_s: float
    start: bool = False
    end: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    refusal: MicroturnError | None = None
    session_options: SessionOptions = field(default_factory=SessionOptions)

    @property
    def opens(self) -> bool:
        """Whether it asks for a new session; START with `resume` goes on with one that is here."""
        return self.start and not self.session_options.resume


# With slots: more than thirty attributes would be in a dictionary of each object, and steps read them all the time.
@dataclass(eq=False, slots=True, weakref_slot=True)
class Turn:
    """A turn that runs or waits. The object itself is the turn's token: only its holder may end the turn.

    Attributes:
        request: what was asked.
        options: the session's defaults with what the request said; set by `resolve_options` alone.
        sinks: where it is answered: the request's, and those of its repetitions.
        pieces: what was answered so far; kept for a numbered turn, which may be asked for again, and on demand.
        keeps_pieces: whether they are kept.
        unsent: pieces that no sink has yet: they wait for those behind them.
        send_at_s: when the next of them go to the sinks.
        on_end: is told how the turn ended, once.
        number: its place among the turns of its session.
        checkpoint: what its session's history is put back to when the turn is undone; None before it runs.
        num_cut: tokens that its `rewind_to` took from the context.
        appended_ids: the ids that the input became.
        num_input: tokens appended, embeddings included.
        num_output: tokens generated.
        num_computed: tokens that went through the model.
        num_cached: tokens that were in the cache when the turn began.
        num_drafted: tokens of drafts that were verified.
        num_accepted: those of them that became output.
        due_s: when it should be done; the scheduler's order.
        prepared: its text, where that has been tokenized as far as it can be without its context.
        restore_s: how long it waited, before its first token, for KV that was outside the pool.
        model_fingerprint: of the model here, reported to the turn that opens a session.
        is_answered: whether it has ended.
        is_paused: nobody hears it though it runs, and nothing of it is computed until somebody comes back.
        max_tokens: to generate at most: 16 by default; an empty input generates only if its own turn says so.
        generates: whether that is more than none.
        is_greedy: whether its tokens are the likeliest, and nothing more is said of them, where no grammar has a say.
    """

    request: TurnRequest
    options: TurnOptions = field(default_factory=TurnOptions)
    sinks: list[TurnSink] = field(default_factory=list)
    pieces: list[TurnOutput] = field(default_factory=list)
    keeps_pieces: bool = field(init=False)
    unsent: list[TurnOutput] = field(default_factory=list)
    send_at_s: float = -math.inf
    on_end: Callable[[Turn, Status | MicroturnError], None] = lambda _turn, _answer: None
    number: int = 0
    checkpoint: Checkpoint | None = None
    num_cut: int = 0
    appended_ids: list[int] = field(default_factory=list)
    num_input: int = 0
    num_output: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    due_s: float = 0.0
    begun_s: float = 0.0
    restore_s: float = 0.0
    first_token_s: float | None = None
    stop_reason: int | str | None = None
    prepared: PreparedText | None = None
    grammar: AnswerGrammar | None = None
    matcher: AnswerMatcher | None = None
    model_fingerprint: str | None = None
    is_answered: bool = False
    is_paused: bool = False
    max_tokens: int = field(init=False)
    generates: bool = field(init=False)
    is_greedy: bool = field(init=False)

    def __post_init__(self) -> None:
        self.sinks.append(self.request.sink)
        self.keeps_pieces = self.is_numbered
        self._set_options(self.options)

    def resolve_options(self, defaults: TurnOptions) -> None:
        """Gives it its options: those that its request said, and its session's defaults for the others."""
        self._set_options(defaults.updated(self.request.options))

    def _set_options(self, options: TurnOptions) -> None:
        self.options = options
        is_silent = options.count_only or ("max_tokens" not in self.request.options and self.request.input.is_empty)
        asked = 16 if options.max_tokens is None else options.max_tokens
        self.max_tokens = 0 if is_silent else asked
        self.generates = self.max_tokens > 0
        changes = options.temperature or options.has_penalties or options.logit_bias or options.min_tokens
        self.is_greedy = not (changes or options.logprobs)

    def put(self, output: TurnOutput, now_s: float) -> None:
        """Answers with a piece, or keeps it until those behind it are there; one with a status is the last."""
        self.is_answered = output.status is not None
        if self.keeps_pieces:
            self.pieces.append(output)
        if self.is_answered or (self.options.stream and now_s >= self.send_at_s):
            if self.options.stream_interval_ms:
                self.send_at_s = now_s + self.options.stream_interval_ms / 1e3
            answer = output
            if self.unsent:
                answer, self.unsent = TurnOutput.joined([*self.unsent, output]), []
            self._send(answer)
        else:
            self.unsent.append(output)
        if output.status is not None:
            self.on_end(self, output.status)

    def _send(self, answer: TurnOutput) -> None:
        for sink in self.sinks:
            sink.put(answer)

    def fail(self, error: MicroturnError) -> None:
        """Answers that the turn changed nothing, and why."""
        self.is_answered = True
        for sink in self.sinks:
            sink.fail(error)
        self.on_end(self, error)

    def begin(self, now_s: float, *, num_cached: int, num_steps: int, priority: int) -> None:
        """Begins to run: what is in the cache, and how many forward passes the input takes, is known now."""
        self.begun_s, self.num_cached = now_s, num_cached
        due_s = self.request.arrived_s + BEAT_S * num_steps if self.deadline_s is None else self.deadline_s
        self.due_s = due_s - BEAT_S * priority

    def refuse(self, error: MicroturnError) -> None:
        """Has it refused when its time to be received comes."""
        self.request = replace(self.request, refusal=error)

    def attach(self, sink: TurnSink) -> None:
        """Answers a repetition too, from the beginning on."""
        if self.pieces and self.options.stream:
            if self.unsent:  # else it would get these twice
                answer, self.unsent = TurnOutput.joined(self.unsent), []
                self._send(answer)
            sink.put(TurnOutput.joined(self.pieces))
        self.sinks.append(sink)

    def detach(self, sink: TurnSink, error: MicroturnError) -> None:
        """The client of this sink has gone, if it is one of the turn's: it ends with an error, and the turn goes on."""
        others = [other for other in self.sinks if other is not sink]
        if len(others) < len(self.sinks):
            self.sinks = others
            sink.fail(error)

    @property
    def is_numbered(self) -> bool:
        """Whether the client numbered it: then it is done once, however often it is sent."""
        return self.request.options.get("turn") is not None

    @property
    def len_before(self) -> int:
        """Length of the context that its input was appended to."""
        assert self.checkpoint is not None, "a turn whose input was never appended"
        return self.checkpoint.context_len

    @property
    def deadline_s(self) -> float | None:
        """When it must be done, by the engine's clock; None is never."""
        return self.request.arrived_s + self.options.deadline_ms / 1e3 if self.options.deadline_ms else None

    def is_late(self, now_s: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline_s is not None and self.deadline_s <= now_s

    @property
    def interrupts(self) -> bool:
        """Whether it ends the turns before it; an empty one does so only if it says so itself, as with max_tokens."""
        if self.options.count_only:
            return False
        if self.request.input.is_empty and not self.generates:
            return self.request.options.get("on_overlap") == "interrupt"
        return self.options.on_overlap == "interrupt"

    @property
    def is_keepalive(self) -> bool:
        """Whether it changes nothing; such a turn has no place among the others."""
        asks = self.generates or self.interrupts or self.options.role or self.options.rewind_to is not None
        changes = not self.options.count_only and (asks or not self.request.input.is_empty)
        return not changes and not self.request.end and not self.is_numbered

    @property
    def num_passes_left(self) -> int:
        """Forward passes that it still needs, once its input fits one: each of them makes a token."""
        num_left = self.max_tokens - self.num_output
        return num_left if num_left > 1 else 1
