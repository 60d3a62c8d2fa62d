"""The engine's view of text: one object per session that turns text into token ids and back.

The engine handles token ids only. It calls the codec on the engine thread, in the order of the session's turns, and
rolls it back by assigning an earlier state. Long texts are encoded before, in another thread: see `PrepareText`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from microturn.text.prepared_text import PreparedText


@dataclass(frozen=True)
class Piece:
    """The text that one generated token made certain.

    Attributes:
        text: new text.
        stop: the stop string that is now complete, or None.
    """

    text: str
    stop: str | None = None


class Codec(Protocol):
    """A session's text.

    Attributes:
        state: the whole state; immutable, hashable, assignable.
        tools: of its chat template, from `tools_as_json`.
    """

    state: Any

    @property
    def tools(self) -> str: ...

    @property
    def num_held(self) -> int:
        """Characters of input that have no ids yet."""
        ...

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
        prepared: PreparedText | None = None,
    ) -> list[int]:
        """Appends text.

        Args:
            text: continues the open message, or begins one.
            role: of the text's message; None for the open one.
            parse_special: whether special tokens in the text are tokens. Otherwise they are plain text.
            flush: whether generation follows, so that all text must be in the context.
            last_token_id: the last token of the context; None if there is none, or if an embedding came last.
            prepared: the same text, prepared: the result is the same, and faster.

        Returns:
            Ids that are now certain to be appended. The rest is held until more text, another role or a flush.

        Errors:
            InvalidArgument: the role cannot be used, or not here. The state is unchanged.
        """
        ...

    def append_other(self, *, role: str | None, last_token_id: int | None, input_follows: bool) -> list[int]:
        """Prepares for token ids, embeddings, or generation without input.

        Args:
            role: of its message; None for the open one.
            last_token_id: as in `append_text`.
            input_follows: whether ids or embeddings are appended next. An incomplete character ends there.

        Returns:
            Ids to append first: the held text and the beginning of the message.

        Errors:
            InvalidArgument: the role cannot be used, or not here. The state is unchanged.
        """
        ...

    def drop_held(self) -> None:
        """Drops held text that has no ids yet."""
        ...

    def drop_half_character(self) -> None:
        """Drops an incomplete character of what was generated last: what comes next is no more of it."""
        ...

    def begin_generation(self, stop: Sequence[str], *, shows_special: bool = False) -> None:
        """Begins a generation with these stop strings.

        Args:
            stop: texts that end it.
            shows_special: whether special tokens are text of it, but for those that end an answer.

        Errors:
            InvalidArgument: a stop string is empty.
        """
        ...

    def accept(self, token_id: int) -> Piece:
        """Accepts the next generated token and returns the text that it made certain."""
        ...

    def end_generation(self) -> str:
        """Ends the generation; returns text that was withheld, before half a character or as a possible stop string."""
        ...


# Creates the codec of a new session with its tools, which are from `tools_as_json`.
CodecFactory = Callable[[str], Codec]

# Prepares a text for any session of the model, in any thread: see `ModelText.prepare`.
PrepareText = Callable[[str, bool, int], PreparedText]
