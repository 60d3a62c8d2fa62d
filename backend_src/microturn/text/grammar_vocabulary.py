"""The vocabulary of a model as llguidance reads it: the bytes that our detokenizer makes of each id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper


@dataclass(frozen=True)
class TokenTexts:
    """What ids stand for.

    Attributes:
        texts: UTF-8 text of each id, as it is detokenized; empty where it has none. As many as the model has logits.
        special: the names of special tokens, which a grammar may use.
        encode: the ids that the model would write a text with.
    """

    texts: Sequence[bytes]
    special: Mapping[int, str]
    encode: Callable[[str], Sequence[int]]


def read_vocabulary(tokens: TokenTexts, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary; takes a second for some 100,000 ids."""
    texts = [*tokens.texts]
    for token_id, name in tokens.special.items():
        texts[token_id] = name.encode()
    source = _TokenizerOf(texts, sorted(tokens.special), eos_ids[0], tokens.encode)
    vocabulary = LLTokenizer(TokenizerWrapper(source), eos_token=list(eos_ids))
    source.fallback = vocabulary.greedy_tokenize
    return vocabulary


class _TokenizerOf:
    """A tokenizer as the library wants it. It is asked how the model would write what a grammar leaves no choice of."""

    def __init__(
        self,
        tokens: list[bytes],
        special_token_ids: list[int],
        eos_token_id: int,
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.fallback: Callable[[str], list[int]] = lambda _text: []
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        # Some tokenizers put a space before the text that stands alone.
        token_ids = list(self._encode(text))
        is_the_text = b"".join(self.tokens[token_id] for token_id in token_ids) == text.encode()
        return token_ids if is_the_text else self.fallback(text)
