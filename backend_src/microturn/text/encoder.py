"""Encodes plain text with a model's tokenizer, at the beginning or anywhere in a context.

Undoes what the tokenizer adds at the beginning of a text (a space, a BOS token) if the text continues a context.
Special tokens in the given text are plain text. Stateless.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from tokenizers import Tokenizer

from microturn.errors import InvalidArgument
from microturn.text.boundaries import UNKNOWN_CHAR, find_boundaries
from microturn.text.special_tokens import SpecialTokens
from microturn.text.vocabulary import Vocabulary

# Text is counted in windows, which may cut a word at each end. A cut adds a few tokens, fewer than this.
_WINDOW_LEN = 4096
_MAX_TORN_TOKENS = 16
_MAX_CHAR_BYTES = 4  # and a token has at least one byte

# Text of this length takes a millisecond, about 1 µs per character.
_MANY_CHARS = 1024


class TextEncoder:
    """Encodes text for one model.

    Attributes:
        special_tokens: the model's special tokens.
        bos_ids: ids before a context that begins with plain text; often one id, or none.
        boundaries: the safe cuts of growing text.

    Args:
        tokenizer: modified here, not to be used by others: its special tokens become plain text.
        vocabulary: of the same tokenizer.

    Errors:
        InvalidArgument: the tokenizer adds a prefix to every text that cannot be removed.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.special_tokens = SpecialTokens(tokenizer.get_added_tokens_decoder())
        self.bos_ids = _ids_in_front(tokenizer)
        self._begins_anew_after_special = _begins_anew_after_special(tokenizer)

        tokenizer.encode_special_tokens = True
        self._first = tokenizer
        self._next = _without_prefix(tokenizer)
        self._breaks = self._find_breaks()
        tokens = list(vocabulary.mergeable_bytes())
        self.boundaries = find_boundaries(tokens, self._first, self._next)
        self._max_token_bytes = max(map(len, (*tokens, *(token.text.encode() for token in self.special_tokens))))
        if len(_encode(self._next, UNKNOWN_CHAR * 8)) == 1:
            self._max_token_bytes = sys.maxsize  # unknown text of any length is one token

    def begins_anew_after(self, previous_id: int | None) -> bool:
        """Whether the tokenizer treats text after this token like text at the beginning of a context."""
        return self._begins_anew_after_special and previous_id in self.special_tokens.ids

    def encode(self, text: str, *, begins: bool) -> list[int]:
        """Ids of plain text.

        Args:
            text: ends at a safe cut, or is followed by no text.
            begins: whether it is, or is treated as, the beginning of a context.
        """
        tokenizer = self._first if begins else self._next
        ids: list[int] = []
        for piece in self._breaks.split(text):
            ids += _encode(tokenizer, piece)
            tokenizer = self._next
        return ids

    def least_num_ids(self, text: str, enough: int | None = None) -> int:
        """Lower bound of a text's number of ids.

        Args:
            text: its special tokens may be tokens or plain text.
            enough: counting stops beyond this many, so that a text of megabytes takes no longer than one with this many
                ids. Without it the bound comes from the text's length and the longest token.
        """
        least = len(text.encode()) // self._max_token_bytes
        if enough is None or least > enough or len(text) * _MAX_CHAR_BYTES <= enough:
            return least
        count = 0
        for start in range(0, len(text), _WINDOW_LEN):
            parsed = self.special_tokens.parse(text[start : start + _WINDOW_LEN], is_complete=True)
            plain = "".join(part for part, _ in parsed.parts) + parsed.rest
            count += max(0, len(_encode(self._next, plain)) - _MAX_TORN_TOKENS)
            if count > enough:
                break
        return max(least, count)

    def _find_breaks(self) -> re.Pattern[str]:
        """Finds places where text must be split, or it would become a special token.

        Some vocabularies have merges from the spelling of a special token to that token.
        """
        breaks = [
            f"(?<={re.escape(token.text[0])})(?={re.escape(token.text[1:])})"
            for token in self.special_tokens
            if len(token.text) > 1 and token.id in _encode(self._next, token.text)
        ]
        return re.compile("|".join(breaks) if breaks else "(?!)")


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if len(text) <= _MANY_CHARS:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    else:
        # `encode_batch` releases the GIL, `encode` does not.
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _ids_in_front(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids that the tokenizer's post-processor puts before a text."""
    ids, text_ids = tokenizer.encode("a").ids, _encode(tokenizer, "a")
    return next(tuple(ids[:at]) for at in range(len(ids)) if ids[at : at + len(text_ids)] == text_ids)


def _begins_anew_after_special(tokenizer: Tokenizer) -> bool:
    """Whether text after a special token is tokenized like the beginning of a text; needs special tokens parsed."""
    added_tokens = tokenizer.get_added_tokens_decoder()
    special = next((token.content for token in added_tokens.values() if token.special and not token.rstrip), None)
    return special is not None and _encode(tokenizer, special + "a")[1:] == _encode(tokenizer, "a")


def _without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without the space that it adds before a text; the same object if it adds none."""
    if _spells_plainly(tokenizer):
        return tokenizer
    description = json.loads(tokenizer.to_str())
    for stage in ("normalizer", "pre_tokenizer"):
        description[stage] = _drop_prefix(description[stage])
    changed = Tokenizer.from_str(json.dumps(description))
    changed.encode_special_tokens = True
    if not _spells_plainly(changed):
        raise InvalidArgument(
            "this tokenizer puts something in front of every text and Microturn cannot tell what: "
            "send input_ids to this model, or give one with another tokenizer"
        )
    return changed


def _spells_plainly(tokenizer: Tokenizer) -> bool:
    return "".join(tokenizer.encode("a", add_special_tokens=False).tokens) == "a"


def _drop_prefix(component: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, without the space before a text; null if nothing is left."""
    match component:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**component, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**component, "add_prefix_space": False}
        case {"type": "Sequence"}:
            ((name, items),) = ((name, items) for name, items in component.items() if name != "type")
            return {"type": "Sequence", name: [item for item in map(_drop_prefix, items) if item is not None]}
    return component
