"""What people say: common English words, of which most tokenizers make one token each."""

from __future__ import annotations

import random

_SENTENCE = "the river runs slowly past our small house while the children play under an old apple tree in the sun"
_WORDS = _SENTENCE.split()


def words(chance: random.Random, num: int) -> str:
    """So many words, each with the space before it."""
    return "".join(f" {word}" for word in chance.choices(_WORDS, k=num))
