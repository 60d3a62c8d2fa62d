"""The options of turns and sessions, as types alone, so that an editor completes them and a type checker finds a slip.

Values are checked by the server, which names the nearest option for one that it does not know; PROTOCOL.md has ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

MessageRole = Literal["system", "user", "assistant", "tool"]
OnOverlap = Literal["queue", "interrupt"]
Overflow = Literal["error", "window"]
History = Literal["bounded", "whole"]


class AppendOptions(TypedDict, total=False):
    """Options about the input of a turn.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``: whose message the input belongs to, by the chat
            template of the model. Another role than that of the open message closes it and opens the next.
        parse_special: special tokens written inside the text count as such; else they are plain text.
        return_appended_ids: the status tells the ids that the input became.
        count_only: nothing is appended and nothing generated: the status says in ``usage.input_tokens`` how many tokens
            the input would become here, if it were answered.
        turn: the turn's number, that of the first being 0: sent again, it is answered again and not done again.
        on_overlap: ``queue`` waits for the turns that are not done, ``interrupt`` ends them: what was generated stays
            in the context, what waited is appended and not answered.
        rewind_to: cuts the context back to this absolute position first; see ``Tokens.position``.
        deadline_ms: milliseconds that the turn has on the server; then it ends with what there is. 0 is for ever.
        traceparent: W3C trace context that the server's spans join.
    """

    role: MessageRole
    parse_special: bool
    return_appended_ids: bool
    count_only: bool
    turn: int
    on_overlap: OnOverlap
    rewind_to: int
    deadline_ms: float
    traceparent: str


class GenerationOptions(TypedDict, total=False):
    """Options about what is generated.

    Attributes:
        max_tokens: most tokens to generate; 16 unless told, and 0 for an empty input unless the turn itself tells.
        min_tokens: no end of sequence and no stop before so many tokens.
        temperature: 0 is greedy, which is the default.
        top_p: nucleus sampling, in (0, 1].
        top_k: sample among the k likeliest; 0 for all.
        min_p: drop what is less likely than this share of the likeliest, in [0, 1].
        repetition_penalty: divides the logits of tokens already in the context; 1 does nothing.
        presence_penalty: subtracted from the logits of tokens already in the context, but for special tokens and ends.
        frequency_penalty: subtracted once for each time that a token is in the context; likewise.
        seed: seed of the sampling. That of the session, or of the first turn, holds for every turn without one.
        stop: texts that end the turn; they stay in the context and not in the output.
        stop_token_ids: token ids that end the turn.
        logit_bias: added to the logits of token ids, from -100 to 100.
        ignore_eos: go on behind the end of sequence.
        skip_special_tokens: False has special tokens in the text as they are spelled, but for those that end an answer;
            it is the default of turns in a session with tools, whose marks they may be.
        logprobs: each token comes with its natural-log probability; with a number from 1 to 20, so do as many of the
            likeliest tokens in its place.
        stream: False has the answer come as a whole, when it has ended, which takes server and client less processor
            time. The turn is silent until then: see ``timeout_s``. Turns behind the session's first, also one that
            would interrupt it, wait for its first response: stream that one where it is long.
        stream_interval_ms: the first tokens come at once, those behind them in messages at least so many milliseconds
            apart, and the last at once. A message for each token takes server and client processor time that the model
            could use: 50 is not noticed where the answer is read or spoken. At most 1,000.
        speculate: ``ngram`` verifies what the context has said before as a draft of what it says next: the same
            answer, up to rounding, in fewer steps where a text repeats itself; ``off``, which is the default.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: bool | int
    stream: bool
    stream_interval_ms: float
    speculate: Literal["off", "ngram"]


class GrammarOptions(TypedDict, total=False):
    """What the answer must match, one of the first four. A status with `finish_reason` ``complete`` says that it does.

    In a session with tools the answer may be calls instead: the model chooses, unless ``tool_choice`` does.

    Attributes:
        json_schema: JSON of this schema; ``{}`` is any JSON.
        regex: all of the answer matches it.
        grammar: a grammar in Lark's notation, whose first rule is ``start``.
        choice: one of these texts.
        tool_choice: ``required`` is one or more calls of the session's tools, the name of a tool one call of it, with
            arguments that match the tool's schema; ``auto``, the default, leaves it to the model; with ``none`` what
            the answer must match is all that it may be.
        grammar_from: absolute position at which the value began that the answer goes on with; see ``Tokens.position``.
    """

    json_schema: Mapping[str, object] | str
    regex: str
    grammar: str
    choice: Sequence[str]
    tool_choice: str
    grammar_from: int


class TurnOptions(AppendOptions, GenerationOptions, GrammarOptions, total=False):
    """Options of one turn, and of that turn alone."""


class SessionOptions(GenerationOptions, total=False):
    """Options of a session; those that turns have too are the default of its turns.

    Attributes:
        idle_timeout_s: seconds of silence after which the server ends the session.
        max_context: longest context in tokens; with a window, what is kept of it.
        overflow: "window" for a session that never ends; the contract says what it still sees.
        sink_tokens: first tokens that a window keeps.
        window_tokens: last tokens that a window keeps.
        history: "whole" keeps all inputs on the server, also those that the window has evicted; see
            :attr:`Status.rebuilt`.
        tools: what the model may call, as OpenAI describes functions; the chat template tells the model. Calls come as
            :class:`ToolCall` and go out of the text.
        session_priority: each step makes the session's turns due 200 ms earlier than others'.
        session_key: nobody may use the session without it; the session says it with every turn.
        fork_of: id of a session, as text, whose context this one goes on from; it takes that one's key.
        cache_salt: the first turn shares its KV only with sessions of the same salt (and tenant).
        model_fingerprint: open it only where the model has this one; see :class:`ModelInfo`.
        resume: go on with the session of this id that the server has, rather than open one.
        parse_special: see :class:`AppendOptions`.
        return_appended_ids: see :class:`AppendOptions`.
        on_overlap: see :class:`AppendOptions`.
        deadline_ms: see :class:`AppendOptions`.
    """

    idle_timeout_s: float
    max_context: int
    overflow: Overflow
    sink_tokens: int
    window_tokens: int
    history: History
    tools: Sequence[Mapping[str, object]]
    session_priority: int
    session_key: str
    fork_of: str
    cache_salt: str
    model_fingerprint: str
    resume: bool
    parse_special: bool
    return_appended_ids: bool
    on_overlap: OnOverlap
    deadline_ms: float


# Options that make no sense as a session's default.
ONE_TURN_OPTIONS = TurnOptions.__annotations__.keys() - SessionOptions.__annotations__.keys()

# What a branch has from its parent and may not say itself.
BRANCH_OPTIONS = frozenset(
    ("tools", "cache_salt", "overflow", "sink_tokens", "window_tokens", "history", "resume", "fork_of")
)

# What the contract says for options that nobody sets. `max_tokens` depends on the input, `seed` is drawn by the server.
DEFAULT_MAX_TOKENS = 16
DEFAULTS: Mapping[str, object] = {
    "min_tokens": 0,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": (),
    "stop_token_ids": (),
    "logit_bias": {},
    "ignore_eos": False,
    "skip_special_tokens": True,
    "logprobs": False,
    "stream": True,
    "stream_interval_ms": 0.0,
    "speculate": "off",
    "parse_special": False,
    "return_appended_ids": False,
    "on_overlap": "queue",
    "deadline_ms": 0.0,
}

_SAMPLING_OPTIONS = GenerationOptions.__annotations__.keys() - {
    *("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "logprobs", "speculate"),
    *("skip_special_tokens", "stream", "stream_interval_ms"),
}


def sampling_of(options: Mapping[str, object], start: int | None) -> dict[str, object]:
    """What the tokens of an answer were chosen by: with it the last of them are generated again as they were.

    Args:
        options: of the turn.
        start: absolute position of the answer's first token.
    """
    names = _SAMPLING_OPTIONS
    grammar = GrammarOptions.__annotations__.keys() & options.keys()
    if grammar:
        # Behind its first tokens a value goes on from where it began, and ends where it did.
        options = {"grammar_from": start, **options}
        names = names | grammar | {"grammar_from", "ignore_eos"}
    return {name: options[name] for name in names if name in options}
