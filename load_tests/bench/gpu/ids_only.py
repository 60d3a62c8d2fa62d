"""A codec for an engine that is only ever spoken to in token ids (see `microturn.text.codec.Codec`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microturn.text.codec import Piece

_NO_TEXT = Piece("")


class IdsOnly:
    """No text comes in, and none goes out."""

    state: Any = None
    tools: str = ""
    num_held: int = 0

    def fork(self) -> IdsOnly:
        return IdsOnly()

    def state_as_json(self, state: Any) -> Any:
        return state

    def state_from_json(self, written: Any) -> Any:
        return written

    def least_num_ids(self, text: str, enough: int) -> int:
        raise NotImplementedError("text")

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
        raise NotImplementedError("text")

    def append_other(self, *, role: str | None, last_token_id: int | None, input_follows: bool) -> list[int]:
        return []

    def drop_held(self) -> None: ...

    def drop_half_character(self) -> None: ...

    def begin_generation(self, stop: Sequence[str], *, shows_special: bool = False) -> None: ...

    def accept(self, token_id: int) -> Piece:
        return _NO_TEXT

    def end_generation(self) -> str:
        return ""
