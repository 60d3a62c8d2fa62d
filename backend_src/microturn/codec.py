"""The engine's view of text: one object per session that turns text into token ids and back.

The engine speaks token ids only. It calls the codec on its own thread, in the order of the session's turns, and rolls
it back by assigning an earlier state. What takes long is done before, in another thread: see `PrepareText`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Piece:
    """What one generated token made certain.

    Attributes:
        text: new text.
        stop: the stop string that is now complete, or None.
    """

    text: str
    stop: str | None = None


class Prepared(Protocol):
    """A text of which all that is known without its context has been made ids; see `PrepareText`."""

    @property
    def least_num_ids(self) -> int:
        """How many ids the text becomes at least."""
        ...


class PrepareText(Protocol):
    """Prepares text for any session of the model, in any thread."""

    def __call__(self, text: str, parse_special: bool, enough: int, /) -> Prepared:
        """Makes what ids it can; of a text of more ids than `enough` none."""
        ...


class Codec(Protocol):
    """A session's text.

    Attributes:
        state: all that it remembers; immutable, hashable, assignable.
        tools: what it was made with, as JSON objects.
    """

    state: Any

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...

    def fork(self) -> Codec:
        """Another session's text that goes on from the same state."""
        ...

    def state_as_json(self, state: Any) -> Any:
        """A state as it is written down: what `json.dumps` takes."""
        ...

    def state_from_json(self, written: Any) -> Any:
        """A state that `state_as_json` wrote, in this process or another.

        Errors:
            ValueError, TypeError, KeyError: it did not.
        """
        ...

    def least_num_ids(self, text: str, enough: int) -> int:
        """How many ids this text and what is held become at least; quick, however long the text.

        Beyond `enough` nobody wants to know more.
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

        The same with `prepared`, which the text has been, and sooner.
        """
        ...

    def append_other(self, *, role: str | None, last_token_id: int | None, input_follows: bool) -> list[int]:
        """Ids that precede input which is not text (`input_follows`), or generation without input."""
        ...

    def drop_held(self) -> None:
        """Forgets text that has no ids yet."""
        ...

    def begin_generation(self, stop: Sequence[str]) -> None:
        """From here on these strings, and no others, stop the generation."""
        ...

    def accept(self, token_id: int) -> Piece:
        """Takes the next generated token."""
        ...

    def end_generation(self) -> str:
        """Text that was withheld only because it might have begun a stop string."""
        ...


class CodecFactory(Protocol):
    """Makes the codec of a new session."""

    def __call__(self, tools: Sequence[Mapping[str, Any]]) -> Codec: ...
