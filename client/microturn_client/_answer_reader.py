"""Reads an answer's text as it comes: pieces, marks, JSON values. Knows no tool calls.

Each reading is a generator that yields while it needs more text, so what is half there needs no state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]", "(": ")"}


class MalformedError(Exception):
    """The text is not what is being read."""


class AnswerEndedError(Exception):
    """The text has ended within what is being read."""


class AnswerReader:
    """A text that grows.

    Attributes:
        taken: all that was read since this was last emptied.
    """

    def __init__(self) -> None:
        self.taken = ""
        self._text = ""
        self._is_complete = False

    def grow(self, text: str) -> None:
        """More of the text has come."""
        self._text += text

    def complete(self) -> None:
        """No more will come."""
        self._is_complete = True

    # ---- characters ----

    def peek(self) -> Reading[str]:
        """The next character, which stays there.

        Raises:
            AnswerEndedError: there is none.
        """
        yield from self._await(1)
        return self._text[0]

    def take(self, length: int = 1) -> str:
        """The next characters, which are there."""
        text, self._text = self._text[:length], self._text[length:]
        self.taken += text
        return text

    def put_back(self) -> None:
        """What was taken is read again."""
        self._text, self.taken = self.taken + self._text, ""

    def skip_space(self, more: str = "") -> Reading[None]:
        """Reads whitespace, and these characters."""
        while (yield from self.peek()) in _SPACE + more:
            self.take()

    def expect(self, text: str) -> Reading[None]:
        """Reads this text.

        Raises:
            MalformedError: something else comes.
        """
        for char in text:
            if (yield from self.peek()) != char:
                raise MalformedError
            self.take()

    def optional(self, text: str) -> Reading[bool]:
        """Reads this text if it comes next; whether it does."""
        while not self._is_complete and len(self._text) < len(text) and text.startswith(self._text):
            yield
        comes = self._text.startswith(text)
        if comes:
            self.take(len(text))
        return comes

    def until(self, chars: str) -> Reading[str]:
        """Reads up to one of these characters, which stays there."""
        text = ""
        while (yield from self.peek()) not in chars:
            text += self.take()
        return text

    # ---- marks ----

    def until_mark(self, marks: Collection[str], told: Callable[[str], None]) -> Reading[str | None]:
        """Reads up to a mark and over it; tells what comes before it, but for what may begin a mark.

        Returns:
            The mark; None where the text ended.
        """
        while True:
            found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
            at, mark = min(found, default=(len(self._text), None))
            if mark is None and not self._is_complete:
                at -= self._num_undecided(marks)
            if at:
                told(self.take(at))
            if mark is not None:
                self.take(len(mark))
                return mark
            if self._is_complete:
                return None
            yield

    # ---- values ----

    def value(self, told: Callable[[str], None] = lambda _: None) -> Reading[str]:
        """Reads a JSON value and returns it as it is written; tells its characters as they come.

        Raises:
            MalformedError: its brackets do not close each other.
        """
        text, open_brackets = "", ""
        while True:
            char = yield from self.peek()
            if char in '"':
                piece = yield from self.quoted()
            elif not open_brackets and text and char in _SPACE + ",}])":
                return text  # behind a number or a word
            else:
                piece = self.take()
                if char in _CLOSING:
                    open_brackets += _CLOSING[char]
                elif char in "}])":
                    if not open_brackets.endswith(char):
                        raise MalformedError
                    open_brackets = open_brackets[:-1]
            text += piece
            told(piece)
            if not open_brackets and piece[-1] in '"}])':
                return text

    def quoted(self) -> Reading[str]:
        """Reads a string with the quotes around it, which are of the kind that comes first."""
        quote = yield from self.peek()
        text = self.take()
        while True:
            char = yield from self.peek()
            text += self.take()
            if char == "\\":
                yield from self._await(1)
                text += self.take()
            elif char == quote:
                return text

    def _await(self, length: int) -> Reading[None]:
        while len(self._text) < length:
            if self._is_complete:
                raise AnswerEndedError
            yield

    def _num_undecided(self, marks: Collection[str]) -> int:
        """Length of the longest end of the text that a mark may begin with."""
        longest = max(len(mark) for mark in marks) - 1
        ends = range(min(longest, len(self._text)), 0, -1)
        return next((num for num in ends if any(mark.startswith(self._text[-num:]) for mark in marks)), 0)
