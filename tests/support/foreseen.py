"""Drafts for a model whose logits are a hash of all that it sees: in what it says, nothing ever repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

from support.fake_runner import VOCAB_SIZE, expected_tokens


def foreseen(token_ids: Sequence[int], num_tokens: int, *, num_right: int | None = None) -> list[int]:
    """What a greedy turn of a session without a window will answer, up to a place where it is wrong.

    Args:
        token_ids: the context.
        num_tokens: of the draft.
        num_right: how many are right; None lets the length of the context say, which comes to 0, 1, … and all.
    """
    draft = expected_tokens(list(token_ids), num_tokens)
    if num_right is None:
        num_right = len(token_ids) % (num_tokens + 1)
    if num_right < num_tokens:
        draft[num_right] = (draft[num_right] + 1) % VOCAB_SIZE
    return draft
