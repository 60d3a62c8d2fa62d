"""What a turn brings: token ids, text or embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from microturn.text.codec import Codec


@dataclass(frozen=True)
class TokenInput:
    """New token ids, perhaps none."""

    token_ids: Sequence[int]

    @property
    def is_empty(self) -> bool:
        return not self.token_ids


@dataclass(frozen=True)
class TextInput:
    """New text."""

    text: str

    @property
    def is_empty(self) -> bool:
        return not self.text


@dataclass(frozen=True)
class EmbedInput:
    """New embeddings, float32 [n, hidden]."""

    embeds: Tensor

    @property
    def is_empty(self) -> bool:
        return len(self.embeds) == 0


TurnInput = TokenInput | TextInput | EmbedInput


def least_input_len(given: TurnInput, codec: Codec) -> int:
    """How many tokens an input becomes at least; quick, however long it is."""
    match given:
        case TokenInput(token_ids):
            return len(token_ids)
        case TextInput(text):
            return codec.least_num_ids(text, 0)
        case EmbedInput(embeds):
            return len(embeds)
