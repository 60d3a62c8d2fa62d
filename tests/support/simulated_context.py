"""A session's context in a few lines, as far as a gateway can tell: a token a character, and text that is held back.

A message begins with a token of its own. The last characters of what is appended may be held until more comes, as the
server does with half a word; a rewind keeps what turns had left without tokens that ended there. An answer is given,
and may end by itself: with a token that says so, behind which nothing of its message may follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from microturn_client import Status, Timing, Tokens, Usage
from microturn_gateway.context import Content, Message


def status_of(context_len: int, **fields: object) -> Status:
    status = Status(
        finish_reason="append",
        stop_reason=None,
        turn=0,
        context_len=context_len,
        kept_len=context_len,
        usage=Usage(0, 0, 0, 0),
        timing_ms=Timing(0.0, 0.0, 1.0, 0.0, 1.0),
        expires_in_s=60.0,
        seed=1,
    )
    return replace(status, **fields)


_END = "</>"
_END_ID = 2


@dataclass(frozen=True)
class _Mark:
    end: int
    held: str
    role: str


class SimulatedContext:
    """What a server holds of one session."""

    def __init__(self) -> None:
        self.tokens: list[str | int] = []
        self._held = ""
        self._role = ""
        self._marks: list[_Mark] = []

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> str:
        """All of it but for the ends of answers, what is held included."""
        return "".join(str(token) for token in self.tokens if token != _END) + self._held

    def append(self, message: Message, rewind_to: int | None = None, num_held: int = 0) -> Status:
        """A turn that appends, and leaves so many characters without tokens."""
        self.rewind(rewind_to)
        before = len(self)
        self._open(message.role)
        if isinstance(message.content, str):
            text = self._held + message.content
            certain = max(0, len(text) - num_held)
            self.tokens += text[:certain]
            self._held = text[certain:]
        else:
            self._flush()
            self.tokens += message.content
        self._marks.append(_Mark(len(self), self._held, self._role))
        num_new = len(self) - before
        return status_of(len(self), usage=Usage(num_new, 0, num_new, 0))

    def answer(
        self, parts: Sequence[str], rewind_to: int | None = None, *, ends: bool = False
    ) -> tuple[list[Tokens], Status]:
        """A turn that generates a token for each part of a text; an empty part is half a character.

        Args:
            parts: of the text.
            rewind_to: where it cuts before.
            ends: the model ends it, in the response of the last part.
        """
        self.rewind(rewind_to)
        before = len(self)
        self._open("assistant")
        self._flush()
        self._marks.append(_Mark(len(self), "", self._role))
        num_new = len(self) - before
        events = [Tokens(part, (index,), len(self) + index) for index, part in enumerate(parts)]
        self.tokens += parts
        if ends:
            last = events.pop() if events else Tokens("", (), len(self))
            events.append(replace(last, ids=(*last.ids, _END_ID)))
            self.tokens.append(_END)
        num_parts = len(parts) + ends
        usage = Usage(num_new, num_parts, num_new + num_parts, 0)
        stop_reason = _END_ID if ends else None
        return events, status_of(len(self), finish_reason="stop", stop_reason=stop_reason, usage=usage)

    def rewind(self, position: int | None) -> None:
        """Cuts, as the wire contract says."""
        if position is None:
            return
        assert position <= len(self)
        del self.tokens[position:]
        self._marks = [mark for mark in self._marks if mark.end <= position]
        last = self._marks[-1] if self._marks else _Mark(0, "", "")
        self._role = last.role
        self._held = last.held if last.end == position else ""

    def _open(self, role: str) -> None:
        assert role != self._role or self.tokens[-1:] != [_END], "behind the end of a message"
        if role != self._role:
            self._flush()
            self.tokens.append(f"<{role}>")
            self._role = role

    def _flush(self) -> None:
        self.tokens += self._held
        self._held = ""


def as_text(messages: Sequence[Message]) -> str:
    """What the context shall be after these messages."""
    text, role = "", ""
    for message in messages:
        text += (f"<{message.role}>" if message.role != role else "") + _written(message.content)
        role = message.role
    return text


def _written(content: Content) -> str:
    return content if isinstance(content, str) else "".join(map(str, content))
