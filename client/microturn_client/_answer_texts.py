"""What answers read, token by token, in columns: four bytes a token and sixteen an answer beside the text itself.

answers at 5: "a" "" "bc"   at 20: "d"
_starts      5                20
_lens        1 0 2            1           bytes of text that came with each token
_num_tokens        3          4           behind each answer
_text        abc              d
_text_ends         3          4
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

_BYTES_PER_ANSWER = 24
_BYTES_PER_TOKEN = 4


class AnswerTexts:
    """Texts of answers by the absolute position of their first tokens, which grow."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._lens = array("I")
        self._num_tokens = array("q")
        self._text = bytearray()
        self._text_ends = array("q")

    @property
    def num_bytes(self) -> int:
        """About how much memory they take."""
        return len(self._text) + _BYTES_PER_TOKEN * len(self._lens) + _BYTES_PER_ANSWER * len(self._starts)

    def add(self, start: int, texts: Sequence[str]) -> None:
        """Adds an answer behind the others: the text that came with each of its tokens."""
        if not any(texts):
            return
        encoded = [text.encode() for text in texts]
        self._starts.append(start)
        self._lens.extend(map(len, encoded))
        self._num_tokens.append(len(self._lens))
        self._text += b"".join(encoded)
        self._text_ends.append(len(self._text))

    def text(self, start: int) -> str:
        """The text of the answer whose first token has this position; empty where none is known."""
        index = bisect_left(self._starts, start)
        if index == len(self._starts) or self._starts[index] != start:
            return ""
        return self._text[self._before(self._text_ends, index) : self._text_ends[index]].decode()

    def cut(self, position: int) -> None:
        """Forgets the text of all tokens from a position on."""
        num_kept = bisect_left(self._starts, position)
        if num_kept:
            last = num_kept - 1
            first_token = self._before(self._num_tokens, last)
            num_tokens = min(self._num_tokens[last], first_token + position - self._starts[last])
            self._num_tokens[last] = num_tokens
            self._text_ends[last] = self._before(self._text_ends, last) + sum(self._lens[first_token:num_tokens])
        del self._starts[num_kept:], self._num_tokens[num_kept:], self._text_ends[num_kept:]
        del self._lens[self._before(self._num_tokens, num_kept) :]
        del self._text[self._before(self._text_ends, num_kept) :]

    def drop_before(self, position: int) -> None:
        """Forgets the answers that begin before a position."""
        num_dropped = bisect_left(self._starts, position)
        num_tokens, num_bytes = self._before(self._num_tokens, num_dropped), self._before(self._text_ends, num_dropped)
        del self._starts[:num_dropped], self._lens[:num_tokens], self._text[:num_bytes]
        self._num_tokens = array("q", (count - num_tokens for count in self._num_tokens[num_dropped:]))
        self._text_ends = array("q", (end - num_bytes for end in self._text_ends[num_dropped:]))

    @staticmethod
    def _before(ends: array[int], index: int) -> int:
        return ends[index - 1] if index else 0
