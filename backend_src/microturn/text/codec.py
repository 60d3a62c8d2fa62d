"""The engine's view of text: one object per session that turns text into token ids and back.

The engine handles token ids only. It calls the codec on the engine thread, in the order of the session's turns, and
rolls it back by assigning an earlier state. Long texts are encoded before, in another thread: see `PrepareText`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Piece:
    """The text that one generated token made certain.

    Attributes:
        text: new text.
        stop: the stop string that is now complete, or None.
    """

    text: str
    stop: str | None = None


class Prepared(Protocol):
    """A text encoded as far as possible without its context; see `PrepareText`."""

    @property
    def least_num_ids(self) -> int:
        """Lower bound of the text's number of ids."""
        ...


class PrepareText(Protocol):
    """Encodes text for any session of the model, in any thread."""

    def __call__(self, text: str, parse_special: bool, enough: int, /) -> Prepared:
        """Encodes as much as possible; nothing of a text of more than `enough` ids."""
        ...


class Codec(Protocol):
    """A session's text.

    Attributes:
        state: the whole state; immutable, hashable, assignable.
        tools: of its chat template, as JSON objects.
    """

    state: Any

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    def fork(self) -> Codec:
        """A codec for another session, with the same state."""
        ...

    def state_as_json(self, state: Any) -> Any:
        """A state as `json.dumps` takes it."""
        ...

    def state_from_json(self, written: Any) -> Any:
        """Reads a state that `state_as_json` wrote, in this process or another.

        Errors:
            ValueError, TypeError, KeyError: it is not one.
        """
        ...

    def least_num_ids(self, text: str, enough: int) -> int:
        """Lower bound of the ids of this text and the held text; quick for text of any length.

        Counting may stop beyond `enough`.
        """
        ...

    def append_text(
        self,
        text: str,
        *,
        role: str | None,
        parse_special: bool,
        flush: bool,
        last_token_id: int | None,
        prepared: Any = None,
    ) -> list[int]:
        """Ids that are now certain to be appended; `flush` makes all of the text certain.

        `prepared` is the same text, prepared: the result is the same, and faster.
        """
        ...

    def append_other(self, *, role: str | None, last_token_id: int | None, input_follows: bool) -> list[int]:
        """Ids to append before input that is not text (`input_follows`), or before generation without input."""
        ...

    def drop_held(self) -> None:
        """Drops held text that has no ids yet."""
        ...

    def begin_generation(self, stop: Sequence[str]) -> None:
        """Sets the stop strings of the generation that begins."""
        ...

    def accept(self, token_id: int) -> Piece:
        """Accepts the next generated token."""
        ...

    def end_generation(self) -> str:
        """Ends the generation; returns text that was withheld as the possible beginning of a stop string."""
        ...


class CodecFactory(Protocol):
    """Creates the codec of a new session."""

    def __call__(self, tools: Sequence[Mapping[str, Any]]) -> Codec: ...
