"""The text bytes of each token of a tokenizer.

Supports the two spellings that causal language models use: byte-level (each byte is a visible character, as in GPT-2),
and plain characters with a mark for the space and ``<0xNN>`` for single bytes, as in SentencePiece. For any other
spelling it asks the tokenizer's decoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


# A character that Latin-1 does not have.
_NO_BYTE = 256


def _byte_level_table() -> dict[int, int]:
    """The byte-level alphabet for `str.translate`: bytes visible in Latin-1 stand for themselves, the others follow.

    Characters outside of it become `_NO_BYTE`, or stay beyond Latin-1.
    """
    alphabet = set(map(ord, pre_tokenizers.ByteLevel.alphabet()))
    invisible = sorted(set(range(256)) - alphabet)
    followers = sorted(alphabet - set(range(256)))
    return dict.fromkeys(invisible, _NO_BYTE) | dict(zip(followers, invisible, strict=True))


class Vocabulary:
    """The tokens of a tokenizer as bytes of text.

    Args:
        tokenizer: of the model.
        eos_ids: tokens that end an answer, and are no text of it.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int] = ()) -> None:
        kinds = set(_kinds(json.loads(tokenizer.decoder.__getstate__()))) if tokenizer.decoder is not None else set()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token_id for token_id, token in added if token.special}
        self._special_texts = {
            token_id: token.content for token_id, token in added if token.special and token_id not in eos_ids
        }
        self._byte_level = _byte_level_table() if "ByteLevel" in kinds else None
        self.has_byte_fallback = "ByteFallback" in kinds
        self._anchor_id = tokenizer.encode("a", add_special_tokens=False).ids[-1]
        self._anchor_text = tokenizer.decode([self._anchor_id])
        self._bytes_of_id: dict[int, bytes] = {}

    def text_bytes(self, token_id: int) -> bytes:
        """UTF-8 of a generated token's text, which may begin or end inside a character.

        Empty for special tokens and unknown ids.
        """
        known = self._bytes_of_id.get(token_id)
        if known is None:
            known = self._bytes_of_id[token_id] = self._find_text_bytes(token_id, is_first=False)
        return known

    def special_text(self, token_id: int) -> str:
        """A special token as it is spelled; empty for other tokens, and for those that end an answer."""
        return self._special_texts.get(token_id, "")

    def first_text_bytes(self, token_id: int) -> bytes:
        """The same for the first token of a text: some decoders drop its leading space."""
        return self._find_text_bytes(token_id, is_first=True)

    def _find_text_bytes(self, token_id: int, *, is_first: bool) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        if self._byte_level is not None:
            return self._spelled_bytes(token)
        byte_token = _BYTE_TOKEN.fullmatch(token) if self.has_byte_fallback else None
        if byte_token is not None and (byte := int(byte_token[1], 16)) >= 0x80:
            return bytes([byte])
        if is_first:
            return str(self._tokenizer.decode([token_id])).encode()
        return str(self._tokenizer.decode([self._anchor_id, token_id])).removeprefix(self._anchor_text).encode()

    def _spelled_bytes(self, token: str) -> bytes:
        """Bytes of a token in the byte-level spelling; an added token outside of that alphabet is plain text."""
        assert self._byte_level is not None
        try:
            return token.translate(self._byte_level).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()

    def mergeable_bytes(self) -> Iterator[bytes]:
        """UTF-8 of every token that plain text can produce, with plain spaces."""
        added = self._tokenizer.get_added_tokens_decoder()
        # A token that eats the whitespace behind it must not be cut off from it.
        plain = (token for token in added.values() if not token.special)
        yield from (f"{token.content} ".encode() if token.rstrip else token.content.encode() for token in plain)
        tokens: Iterable[str] = self._tokenizer.get_vocab(with_added_tokens=False)
        if self._byte_level is not None:
            yield from map(self._spelled_bytes, tokens)
            return
        space = "".join(self._tokenizer.encode("a b", add_special_tokens=False).tokens).split("a")[-1].removesuffix("b")
        yield from (token.replace(space, " ").encode() if space else token.encode() for token in tokens)


def _kinds(component: dict[str, Any]) -> Iterator[str]:
    """The types in the JSON of a tokenizer component, including those inside sequences."""
    yield component["type"]
    for value in component.values():
        if isinstance(value, list):
            for item in value:
                if isinstance(item, dict) and "type" in item:
                    yield from _kinds(item)
