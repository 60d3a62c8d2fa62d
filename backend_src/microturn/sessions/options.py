"""What a turn may ask for: the options of the wire contract, parsed and checked when the turn arrives.

Options travel as JSON request parameters; a number may come as a decimal string, a list as a JSON string. What START
sets for a turn option becomes the session's default. Nothing here depends on a session's context.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from microturn.errors import InvalidArgument, did_you_mean
from microturn.sessions.option_values import boolean, integer, list_of, number, one_of, text
from microturn.settings import MAX_IDLE_TIMEOUT_S, TENANT_HEADER
from microturn.text.chat_templates import NO_TOOLS, tools_as_json
from microturn.text.grammar_source import FORMATS, KINDS, MAX_SOURCE_LEN, GrammarSource, check_names

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 1024
MAX_LOGIT_BIASES = 1024
MAX_TOOL_NAME_LEN = 256
MAX_KEY_LEN = 256
MAX_DEADLINE_MS = 3_600_000.0
MAX_STREAM_INTERVAL_MS = 1_000.0
MAX_PRIORITY = 100
MAX_PARAMETERS_LEN = 1 << 20
ROLES = ("system", "user", "assistant", "tool")
NO_CALLS = "none"  # of `tool_choice`

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def _logprobs(value: Any) -> bool | int:
    for parse in (boolean, integer(1, MAX_TOP_LOGPROBS)):
        try:
            return parse(value)
        except ValueError:
            continue
    raise ValueError(f"true, false or an integer from 1 to {MAX_TOP_LOGPROBS}")


def _choice(value: Any) -> tuple[str, ...]:
    expected = f"a JSON list of 1 to {MAX_CHOICES} strings of at least a character, together at most {MAX_SOURCE_LEN}"
    choices: tuple[str, ...] = list_of(str, expected, MAX_CHOICES, bool)(value)
    if not 0 < sum(map(len, choices)) <= MAX_SOURCE_LEN:
        raise ValueError(expected)
    return choices


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a token id and a number, in order; from a JSON object, whose pairs may have been read already."""
    try:
        pairs = json.loads(value, object_pairs_hook=list) if isinstance(value, str) else value
        biases = {_token_id(token_id): _bias(bias) for token_id, bias in pairs}
        if len(biases) < len(pairs) or len(pairs) > MAX_LOGIT_BIASES:
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        expected = f"a JSON object of at most {MAX_LOGIT_BIASES} token ids, each with a number from -100 to 100"
        raise ValueError(expected) from None
    return tuple(sorted(biases.items()))


_token_id, _bias = integer(0, 2**31 - 1), number(-100, 100)


def _traceparent(value: Any) -> str:
    if not isinstance(value, str) or not _TRACEPARENT.fullmatch(value):
        raise ValueError("a W3C trace context, such as 00-<32 hex digits>-<16 hex digits>-01")
    return value


def _tools(value: Any) -> str:
    return tools_as_json(list_of(dict, "a JSON list of at most 128 objects", 128, bool)(value))


def _tool_choice(value: Any) -> str:
    said = text(MAX_TOOL_NAME_LEN)(value)
    return "" if said == "auto" else said


def _option(default: Any, parse: Callable[[Any], Any]) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True)
class TurnOptions:
    """Options of one turn; `client/PROTOCOL.md` says what each one means.

    `max_tokens` None stands for the contract's default, which depends on the input (see `Turn.max_tokens`).
    """

    max_tokens: int | None = _option(None, integer(0, 2**31 - 1))
    min_tokens: int = _option(0, integer(0, 2**31 - 1))
    temperature: float = _option(0.0, number(0, 100))
    top_k: int = _option(0, integer(0, 2**31 - 1))
    top_p: float = _option(1.0, number(0, 1, above_low=True))
    min_p: float = _option(0.0, number(0, 1))
    repetition_penalty: float = _option(1.0, number(0, 100, above_low=True))
    presence_penalty: float = _option(0.0, number(-100, 100))
    frequency_penalty: float = _option(0.0, number(-100, 100))
    seed: int | None = _option(None, integer(0, 2**63 - 1))
    stop: tuple[str, ...] = _option(
        (),
        list_of(
            str,
            f"a JSON list of at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_STRING_LEN} characters",
            MAX_STOP_STRINGS,
            lambda text: 1 <= len(text) <= MAX_STOP_STRING_LEN,
        ),
    )
    stop_token_ids: tuple[int, ...] = _option(
        (),
        list_of(
            int,
            f"a JSON list of at most {MAX_STOP_TOKEN_IDS} token ids",
            MAX_STOP_TOKEN_IDS,
            lambda token_id: token_id >= 0,
        ),
    )
    json_schema: str | None = _option(None, text(MAX_SOURCE_LEN))
    regex: str | None = _option(None, text(MAX_SOURCE_LEN))
    grammar: str | None = _option(None, text(MAX_SOURCE_LEN))
    choice: tuple[str, ...] = _option((), _choice)
    grammar_from: int | None = _option(None, integer(0, 2**53))
    logit_bias: tuple[tuple[int, float], ...] = _option((), _logit_bias)
    tool_choice: str = _option("", _tool_choice)
    ignore_eos: bool = _option(False, boolean)
    skip_special_tokens: bool = _option(True, boolean)
    logprobs: bool | int = _option(False, _logprobs)
    stream: bool = _option(True, boolean)
    stream_interval_ms: float = _option(0.0, number(0, MAX_STREAM_INTERVAL_MS))
    speculate: str = _option("off", one_of("off", "ngram"))
    return_appended_ids: bool = _option(False, boolean)
    count_only: bool = _option(False, boolean)
    parse_special: bool = _option(False, boolean)
    role: str | None = _option(None, one_of(*ROLES))
    traceparent: str | None = _option(None, _traceparent)
    turn: int | None = _option(None, integer(0, 2**53))
    rewind_to: int | None = _option(None, integer(0, 2**53))
    on_overlap: str = _option("queue", one_of("queue", "interrupt"))
    deadline_ms: float = _option(0.0, number(0, MAX_DEADLINE_MS))
    session_key: str | None = _option(None, text(MAX_KEY_LEN))
    tenant: str | None = field(default=None, metadata={"parse": text(MAX_KEY_LEN), "wire_name": TENANT_HEADER})

    def updated(self, given: Mapping[str, Any]) -> TurnOptions:
        """These options, but for those that are given by name."""
        assert given.keys() <= _TURN_OPTIONS, "options that no turn has"
        if not given:
            return self
        # `dataclasses.replace` reads and sets all fields one by one, which takes as long as a row of a step.
        options = object.__new__(TurnOptions)
        vars(options).update(vars(self), **given)
        return options

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens come with each token."""
        return 0 if isinstance(self.logprobs, bool) else self.logprobs

    @property
    def has_penalties(self) -> bool:
        """Whether the history changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class SessionOptions:
    """Options that come with START and hold for the session's life. None means the server's setting."""

    idle_timeout_s: float | None = _option(None, number(0, MAX_IDLE_TIMEOUT_S, above_low=True))
    max_context: int | None = _option(None, integer(1, 2**31 - 1))
    overflow: str | None = _option(None, one_of("error", "window"))
    sink_tokens: int | None = _option(None, integer(0, 2**31 - 1))
    window_tokens: int | None = _option(None, integer(1, 2**31 - 1))
    history: str | None = _option(None, one_of("bounded", "whole"))
    tools: str = _option(NO_TOOLS, _tools)
    session_priority: int = _option(0, integer(-MAX_PRIORITY, MAX_PRIORITY))
    resume: bool = _option(False, boolean)
    fork_of: str | None = _option(None, text(128))
    cache_salt: str = _option("", text(MAX_KEY_LEN))
    model_fingerprint: str | None = _option(None, text(MAX_KEY_LEN))


# What START sets for other turn options is the default of the session's turns; these hold for their turn alone.
OF_ONE_TURN = frozenset(
    {"role", "traceparent", "turn", "rewind_to", "session_key", "tenant", "count_only", *KINDS, "grammar_from"}
)

_TURN_OPTIONS = frozenset(option.name for option in fields(TurnOptions))
_SESSION_OPTIONS = frozenset(option.name for option in fields(SessionOptions))
# By the name on the wire.
_OPTIONS = {
    option.metadata.get("wire_name", option.name): option for option in (*fields(TurnOptions), *fields(SessionOptions))
}


def grammar_source(options: Mapping[str, Any]) -> GrammarSource | None:
    """What the answer of a turn with these options, by name, must match; None is anything.

    A format is without effect where calls are forced; else an answer may still be calls of the session's tools, unless
    `tool_choice` is ``none``.
    """
    choice = options.get("tool_choice", "")
    if choice not in ("", NO_CALLS):
        return GrammarSource("tool_choice", choice)
    for kind in FORMATS:
        said = options.get(kind)
        if said:
            return GrammarSource(kind, said if isinstance(said, str) else json.dumps(said, ensure_ascii=False))
    return None


def parse_turn_options(values: Mapping[str, Any]) -> TurnOptions:
    """Turn options by name.

    Raises:
        ValueError, KeyError: a value or a name that no turn could have brought.
    """
    parsed = {name: _OPTIONS[name].metadata["parse"](value) for name, value in values.items()}
    return replace(TurnOptions(), **parsed)


def parse_parameters(parameters: str, *, start: bool) -> tuple[dict[str, Any], SessionOptions]:
    """Reads a request's parameters.

    Args:
        parameters: a JSON object, or nothing.
        start: whether the turn has START.

    Returns:
        The turn options that were given, by name, and the session options.

    Raises:
        InvalidArgument: for too many of them, a key that comes twice, an unknown one, a value that does not parse, or
            a session option without START.
    """
    if len(parameters) > MAX_PARAMETERS_LEN:
        raise InvalidArgument(f"the options have {len(parameters)} characters: at most {MAX_PARAMETERS_LEN} are read")
    parsed: dict[str, Any] = {}
    pairs: list[tuple[str, Any]] = json.loads(parameters, object_pairs_hook=list) if parameters else []
    for name, value in pairs:
        option = _OPTIONS.get(name)
        if option is None:
            raise InvalidArgument(f"unknown option '{name[:100]}': {did_you_mean(name, _OPTIONS)}")
        if option.name in parsed:
            raise InvalidArgument(f"option '{name}' came twice: send it once")
        if option.name in _SESSION_OPTIONS and not start:
            raise InvalidArgument(f"option '{name}' comes with START only")
        try:
            parsed[option.name] = option.metadata["parse"](value)
        except ValueError as error:
            raise InvalidArgument(f"option '{name}' is {error}") from None
    check_names(parsed)
    session_options = SessionOptions(**{name: value for name, value in parsed.items() if name in _SESSION_OPTIONS})
    return {name: value for name, value in parsed.items() if name in _TURN_OPTIONS}, session_options
