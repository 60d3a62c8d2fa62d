"""Safe cuts: where growing text can be split without changing its tokens.

A cut is safe when the tokens of both halves are the tokens of the whole, whatever follows. Two things prevent that:

* A token across the cut. Tokenizers that merge neighbours (BPE, Unigram) cannot produce one if no token of their
  vocabulary contains such a place: the vocabulary shows which places do.
* A pre-tokenizer, whose regular expressions may look around and split elsewhere when text is missing. A trial
  with characters of all kinds finds this. (A piece across the cut itself is harmless after the first point.)

Candidates are the places between a visible character and a space or, for scripts without spaces, CJK punctuation.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping

from tokenizers import Tokenizer

UNKNOWN_CHAR = "\ue000"  # private use: in no vocabulary

_OPENERS = " 、。，！？"  # cuts are before one of these
_VISIBLE = r"[^\s\x00-\x1f\x7f-\x9f\ufffd]"  # and after one of these

# A cut after one of these behaves like a cut after any other character of its class.
_TRIAL_CLASSES = {
    r"\w": [*"abdelmrstvBS09", *"éßñŁЖωאبक字かカ한ไაա²½①٣ａʰª"],
    r"[^\w!-~]": ["\u0301", "\ufe0f", "\u200b", "\u200d", UNKNOWN_CHAR, *"ีाे…”—。）«👍🏽€°→"],
    **{re.escape(char): [char] for char in f"{string.punctuation}▁"},
}
_TRIAL_CONTEXTS = ("it", " ", ".")
_TRIAL_AFTER = ("", "b", " ", "  b", "\n", "\t", "1", ".", "'s", "(", "字", "”", "，", "\u0301", "👍")


class Boundaries:
    """The safe cuts of one tokenizer.

    Args:
        unsafe_before: for each character that may follow a cut, regular expressions of single characters that must not
            precede it.
    """

    def __init__(self, unsafe_before: Mapping[str, Collection[str]]) -> None:
        cuts = [
            f"(?!{'|'.join(sorted(unsafe)) or '(?!)'}){_VISIBLE}(?={opener})"
            for opener, unsafe in unsafe_before.items()
        ]
        self.openers = "".join(unsafe_before)
        self._cut = re.compile("|".join(cuts) if cuts else "(?!)")
        self._up_to_last_cut = re.compile(f"(?s:.*)(?:{'|'.join(cuts)})" if cuts else "(?!)")

    def all(self, text: str, start: int = 0) -> Iterator[int]:
        """Positions of the safe cuts behind `start`, in order."""
        return (found.end() for found in self._cut.finditer(text, start))

    def last(self, text: str, start: int = 0) -> int:
        """Position of the last safe cut behind `start`; 0 if there is none."""
        found = self._up_to_last_cut.match(text, start)
        return found.end() if found is not None else 0


def find_boundaries(tokens: Iterable[bytes], first: Tokenizer, continuing: Tokenizer) -> Boundaries:
    """The safe cuts of a tokenizer.

    Args:
        tokens: its vocabulary as UTF-8, with plain spaces.
        first: tokenizes text at the beginning of a context.
        continuing: tokenizes text that continues a context.
    """
    joined = b"\xff" + b"\xff".join(tokens) + b"\xff"  # separated by a byte that UTF-8 never has
    unsafe_before = {}
    for opener in _OPENERS:
        in_tokens = set(_chars_before(opener.encode(), joined))
        if "\ufffd" in in_tokens:
            continue  # a token has an incomplete character before the opener: it may be any character
        if _encode(continuing, UNKNOWN_CHAR + opener) != _encode(continuing, UNKNOWN_CHAR) + _encode(
            continuing, opener
        ):
            continue  # the opener is unknown too, and consecutive unknown characters are one token
        unsafe_before[opener] = set(map(re.escape, in_tokens)) | set(_classes_failing(opener, first, continuing))
    return Boundaries(unsafe_before)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _chars_before(opener: bytes, joined: bytes) -> Iterator[str]:
    """Characters that come right before the opener in some token; U+FFFD for an incomplete one.

    A token that ends inside the opener counts too.
    """
    whole_or_begun = [re.escape(opener), *(re.escape(opener[:end]) + rb"(?=\xff)" for end in range(1, len(opener)))]
    for found in re.finditer(rb"(?<!\xff)(?:" + b"|".join(whole_or_begun) + rb")", joined):
        token_start = joined.rfind(b"\xff", 0, found.start()) + 1
        yield joined[token_start : found.start()].decode("utf-8", "replace")[-1]


def _classes_failing(opener: str, first: Tokenizer, continuing: Tokenizer) -> Iterator[str]:
    """Classes of characters after which a cut changes how text is split into pieces."""
    after = [(opener + text, _Pieces(continuing, opener + text)) for text in _TRIAL_AFTER]
    space = _Pieces(continuing, "a b").text[1:-1]

    def is_safe(before: str) -> bool:
        pieces = _Pieces(first, before)
        if space and pieces.text.endswith(space):
            return False  # the tokenizer treats this visible character as a space
        return all(_Pieces(first, before + text).is_split_into(pieces, rest) for text, rest in after)

    for char_class, chars in _TRIAL_CLASSES.items():
        if not all(is_safe(context + char) for context, char in itertools.product(_TRIAL_CONTEXTS, chars)):
            yield char_class


class _Pieces:
    """A text after a tokenizer's normalizer and pre-tokenizer.

    Attributes:
        text: the whole text in the tokenizer's spelling.
        ends: where its pieces end.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        pieces = [text]
        if tokenizer.pre_tokenizer is not None:
            pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        self.text = "".join(pieces)
        self.ends = set(itertools.accumulate(map(len, pieces)))

    def is_split_into(self, head: _Pieces, tail: _Pieces) -> bool:
        """Whether these are the pieces of both, except for a piece across the cut."""
        cut = len(head.text)
        return self.text == head.text + tail.text and self.ends | {cut} == head.ends | {cut + end for end in tail.ends}
