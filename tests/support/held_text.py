"""Text without a place to cut, as that of a script without spaces: it has no ids before an answer begins."""

from __future__ import annotations

from typing import Any

from support.driver import IdsOnly


class HoldsText(IdsOnly):
    """A codec whose state is the text that it holds."""

    def __init__(self) -> None:
        self.state = ""

    @property
    def num_held(self) -> int:
        return len(self.state)

    def append_text(self, text: str, *, flush: bool, **_: Any) -> list[int]:
        held, self.state = self.state + text, ""
        if flush:
            return super().append_text(held)
        self.state = held
        return []

    def append_other(self, **_: Any) -> list[int]:
        return self.append_text("", flush=True)

    def drop_held(self) -> None:
        self.state = ""

    def fork(self) -> HoldsText:
        branch = HoldsText()
        branch.state = self.state
        return branch
