"""Finds a model's special tokens in text, which may end in the middle of one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """One special token.

    Attributes:
        id: its token id.
        text: its spelling.
        eats_space_before: whether whitespace before it belongs to it and is not encoded.
        eats_space_after: the same for whitespace after it.
    """

    id: int
    text: str
    eats_space_before: bool
    eats_space_after: bool


@dataclass(frozen=True, slots=True)
class Parsed:
    """Text split at its special tokens.

    Attributes:
        parts: pairs of plain text (may be empty) and the special token behind it, in order.
        rest: plain text behind the last one.
        undecided: the end of the text, which may be the beginning of a special token.
    """

    parts: list[tuple[str, SpecialToken]]
    rest: str
    undecided: str


class SpecialTokens:
    """Finds special tokens: the leftmost first, and the longest at the same position."""

    def __init__(self, added_tokens: Mapping[int, AddedToken]) -> None:
        self._tokens = {
            token.content: SpecialToken(token_id, token.content, token.lstrip, token.rstrip)
            for token_id, token in added_tokens.items()
            if token.special and token.content
        }
        self.ids = frozenset(token.id for token in self._tokens.values())
        # A model may have thousands of special tokens: look them up by length where one can begin instead of trying
        # each. Nearly all begin with '<' or '['.
        self._lengths = sorted({len(text) for text in self._tokens}, reverse=True)
        first_chars = "".join(re.escape(char) for char in sorted({text[0] for text in self._tokens}))
        self._first_char = re.compile(f"[{first_chars}]" if first_chars else "(?!)")
        self._beginnings = frozenset(text[:end] for text in self._tokens for end in range(1, len(text)))

    def __iter__(self) -> Iterator[SpecialToken]:
        return iter(self._tokens.values())

    def touches(self, text: str, at: int) -> bool:
        """Whether the spelling of a special token spans a position or ends there."""
        return any(
            text[begin : begin + length] in self._tokens
            for length in self._lengths
            for begin in range(max(0, at - length), at)
        )

    @property
    def max_len(self) -> int:
        """Length of the longest spelling in characters."""
        return self._lengths[0] if self._lengths else 0

    def parse(self, text: str, *, is_complete: bool) -> Parsed:
        """Splits text; unless `is_complete`, it stops where more text could form a (longer) special token."""
        undecided_at = len(text) if is_complete else len(text) - self._undecided_len(text)
        parts: list[tuple[str, SpecialToken]] = []
        done = 0
        while (found := self._find(text, done)) is not None and found[0] < undecided_at:
            at, token = found
            parts.append((text[done:at], token))
            done = at + len(token.text)
            if done > undecided_at:  # the apparent beginning was inside this token
                undecided_at = len(text) - self._undecided_len(text[done:])
        return Parsed(parts, text[done:undecided_at], text[undecided_at:])

    def _find(self, text: str, start: int) -> tuple[int, SpecialToken] | None:
        for candidate in self._first_char.finditer(text, start):
            at = candidate.start()
            for length in self._lengths:
                token = self._tokens.get(text[at : at + length])
                if token is not None:
                    return at, token
        return None

    def _undecided_len(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a special token."""
        longest = min(len(text), self._lengths[0] - 1 if self._lengths else 0)
        return next((length for length in range(longest, 0, -1) if text[-length:] in self._beginnings), 0)
