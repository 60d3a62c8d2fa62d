"""What a realtime client sends, read into typed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from microturn_gateway.client_items import parse_item
from microturn_gateway.context import Content
from microturn_gateway.conversation import Item
from microturn_gateway.failures import Refusal
from microturn_gateway.fields import Fields
from microturn_gateway.options import TURN_OPTIONS, take_generation_options
from microturn_gateway.realtime_tools import ToolChoice, Tools, take_choice, take_tools
from microturn_gateway.window import WindowChange, take_window

# What frameworks send along and what changes nothing where only text is heard and said.
_INERT_IN_SESSION = ("audio", "include", "reasoning", "tracing", "truncation")
_INERT_IN_RESPONSE = ("audio", "reasoning")


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made; None where the event says nothing.

    Attributes:
        max_output_tokens: "inf" is as many as there is room for.
        generation: options of the turn, as the wire contract names them; of an event, None takes one back.
        tool_choice: as the client wrote it.
        is_parallel: whether an answer may call more than once.
    """

    max_output_tokens: int | str | None
    generation: Mapping[str, Any]
    tool_choice: ToolChoice | None = None
    is_parallel: bool | None = None

    @property
    def has_limit(self) -> bool:
        """Whether the client says how long an answer may be."""
        return isinstance(self.max_output_tokens, int)


@dataclass(frozen=True)
class UpdateSession:
    """Changes how the session answers; None leaves it.

    Attributes:
        model: that shall answer.
        window: what a session without end keeps.
        inert: what changes nothing in a session of text, as it came, for the client to find it again.
        tools: functions, as they came.
        refused: what is wrong with the rest of it.
    """

    instructions: str | None
    answers: AnswerOptions
    inert: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None
    window: WindowChange = field(default_factory=WindowChange)
    model: str | None = None
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class CreateItem:
    """Adds a message: at the end, or behind another one."""

    item: Item
    previous_id: str | None


@dataclass(frozen=True)
class RetrieveItem:
    """Asks for an item."""

    item_id: str


@dataclass(frozen=True)
class DeleteItem:
    """Takes an item out."""

    item_id: str


@dataclass(frozen=True)
class TruncateItem:
    """Cuts an answer back to what was heard of it: so many characters, or so many milliseconds of speech."""

    item_id: str
    content_index: int
    audio_end_ms: int
    text_end_chars: int | None


@dataclass(frozen=True)
class AppendBuffer:
    """A micro-turn: text or ids that the user's message goes on with."""

    content: Content


@dataclass(frozen=True)
class CommitBuffer:
    """The user's message ends."""


@dataclass(frozen=True)
class ClearBuffer:
    """Takes back what of the user's message is not committed."""


@dataclass(frozen=True)
class ClearAudio:
    """Takes back audio that was not committed, of which there is never any.

    Attributes:
        buffer: the client's (`input_audio_buffer`) or the one that plays (`output_audio_buffer`).
    """

    buffer: str


@dataclass(frozen=True)
class CreateResponse:
    """Asks for an answer."""

    answers: AnswerOptions
    metadata: Mapping[str, str] | None
    tools: Tools | None = None


@dataclass(frozen=True)
class CancelResponse:
    """Stops an answer; None is the one that there is."""

    response_id: str | None


ClientEvent = (
    UpdateSession
    | CreateItem
    | RetrieveItem
    | DeleteItem
    | TruncateItem
    | AppendBuffer
    | CommitBuffer
    | ClearBuffer
    | ClearAudio
    | CreateResponse
    | CancelResponse
)


def parse_event(raw: Mapping[str, Any]) -> ClientEvent:
    """Reads an event.

    Raises:
        Refusal: it is none that this gateway knows, or not of the right shape.
    """
    refused: list[Refusal] = []
    # Only of a session is anything left when a part of it is refused: any other event is done, or is not.
    fields = Fields(raw, refused=refused if raw.get("type") == "session.update" else None)
    fields.ignore("event_id")
    kind = fields.take("type", str)
    parse = _PARSERS.get(kind)
    if parse is None:
        raise Refusal("unknown_event", f"this gateway has no event '{kind}'", param="type")
    event = parse(fields)
    fields.end()
    return replace(event, refused=(*event.refused, *refused)) if isinstance(event, UpdateSession) else event


def parse_session(value: object) -> UpdateSession:
    """Reads a session object, of `session.update` or of a client secret: what is known of it, and what is refused.

    Raises:
        Refusal: it is no object.
    """
    refused: list[Refusal] = []
    fields = Fields(value, "session", refused)
    fields.ignore("object", "id", "expires_at")
    model = fields.take("model", str, None)
    if fields.take("type", str, "realtime") != "realtime":
        fields.refuse("unsupported_parameter", "'session.type' must be 'realtime'", "type")
    instructions = fields.take("instructions", str, None)
    tools = take_tools(fields)
    inert = _without_turn_detection(fields.take_inert(*_INERT_IN_SESSION))
    ours = fields.take_object("microturn")
    window = take_window(ours)
    answers = _take_answers(fields, ours)
    fields.end()
    return UpdateSession(instructions, answers, inert, tools, window, model, tuple(refused))


def _parse_create_item(fields: Fields) -> CreateItem:
    return CreateItem(parse_item(fields.take("item", dict)), fields.take("previous_item_id", str, None))


def _parse_truncate(fields: Fields) -> TruncateItem:
    return TruncateItem(
        fields.take("item_id", str),
        fields.take_int("content_index", 0, 0, 0),
        fields.take_int("audio_end_ms", 0, 2**53, 0),
        fields.take("text_end_chars", int, None),
    )


def _parse_append(fields: Fields) -> AppendBuffer:
    text, ids = fields.take("text", str, ""), fields.take_ids("token_ids")
    if bool(text) == bool(ids):
        raise Refusal("missing_parameter", "give 'text' or 'token_ids', one of them and not empty", param="text")
    return AppendBuffer(text or ids)


def _parse_create_response(fields: Fields) -> CreateResponse:
    given = Fields(fields.take("response", dict, {}), "response")
    if given.take("conversation", str, "auto") != "auto":
        raise Refusal("unsupported_parameter", "a response belongs to the conversation", param="response.conversation")
    if given.take("input", list, None) is not None:  # an empty list too: the answer would be to nothing
        given.refuse("unsupported_parameter", "a response answers the whole conversation", "input")
    given.ignore(*_INERT_IN_RESPONSE)
    tools = take_tools(given)
    answers, metadata = _take_answers(given, given.take_object("microturn")), given.take("metadata", dict, None)
    given.end()
    return CreateResponse(answers, metadata, tools)


def _take_answers(fields: Fields, ours: Fields) -> AnswerOptions:
    modalities = fields.take("output_modalities", list, ["text"])
    if modalities != ["text"]:
        path = fields.path("output_modalities")
        fields.refuse("unsupported_parameter", f"'{path}' must be [\"text\"]: answers are text", "output_modalities")
    most = fields.take("max_output_tokens", (int, str), None)
    if (isinstance(most, str) and most != "inf") or (isinstance(most, int) and most < 1):
        path = fields.path("max_output_tokens")
        fields.refuse("invalid_value", f"'{path}' must be an integer of 1 or more, or 'inf'", "max_output_tokens")
        most = None
    choice = take_choice(fields)
    ours.ignore("beat_ms", "max_context")  # what a client was told of its session it may send back
    generation = {**ours.cleared(TURN_OPTIONS), **take_generation_options(ours)}
    ours.end()
    return AnswerOptions(most, generation, choice, fields.take("parallel_tool_calls", bool, None))


def _without_turn_detection(inert: dict[str, Any]) -> dict[str, Any]:
    """Nothing hears when a speaker begins, and who reads that something does leaves the interrupting to it."""
    match inert:
        case {"audio": {"input": {"turn_detection": _} as heard} as audio}:
            return {**inert, "audio": {**audio, "input": {**heard, "turn_detection": None}}}
    return inert


_PARSERS: Mapping[str, Callable[[Fields], ClientEvent]] = {
    "session.update": lambda fields: parse_session(fields.take("session", dict)),
    "conversation.item.create": _parse_create_item,
    "conversation.item.retrieve": lambda fields: RetrieveItem(fields.take("item_id", str)),
    "conversation.item.delete": lambda fields: DeleteItem(fields.take("item_id", str)),
    "conversation.item.truncate": _parse_truncate,
    "input_text_buffer.append": _parse_append,
    "input_text_buffer.commit": lambda _: CommitBuffer(),
    "input_text_buffer.clear": lambda _: ClearBuffer(),
    "input_audio_buffer.clear": lambda _: ClearAudio("input_audio_buffer"),
    "output_audio_buffer.clear": lambda _: ClearAudio("output_audio_buffer"),
    "response.create": _parse_create_response,
    "response.cancel": lambda fields: CancelResponse(fields.take("response_id", str, None)),
}
