"""Speculation by prompt lookup: what came behind the last tokens when they were in the context before, as a draft.

A draft is verified in the forward pass that computes the token before it: a token is chosen behind each of its tokens,
just as without it, and those of the draft that are the chosen ones are accepted. So the answer is the same, token by
token, and a pass makes several of them where a text repeats itself: code that is edited, a passage that is quoted.

After Saxena, "Prompt Lookup Decoding" (2023), and Leviathan et al., "Fast Inference from Transformers via Speculative
Decoding" (2023), whose acceptance rule is equality where the draft is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from microturn.sessions.context import Context

# The last tokens that are searched. So a lookup takes as long in a context of a million: some 15 µs.
_NUM_SEARCHED = 8192
# Tokens that must be the same, and that are compared: of two places the one with the longer match counts.
_LEAST_MATCH, _MOST_MATCH = 3, 8
# Places that are compared, the last ones.
_NUM_PLACES = 64
_FIRST_LEN, _LEAST_LEN, _MOST_LEN = 4, 2, 16
# In tokens that the time spent on drafts would have made: what may be lost before a pause, and what counts as saved.
_MOST_LOST, _MOST_SAVED = 1.0, 4.0
# Tokens without a draft after a loss; doubled with each until drafts pay.
_FIRST_PAUSE, _MOST_PAUSE = 64, 1024


class Speculation:
    """Makes a session's drafts, and stops while they cost more than they save.

    Nothing here changes what is answered, so it is neither saved nor inherited.
    """

    def __init__(self) -> None:
        self._len = _FIRST_LEN
        self._balance = 0.0
        self._pause = _FIRST_PAUSE
        self._resumes_at = 0

    def draft(self, context: Context, most: int) -> list[int]:
        """Tokens that may come next, at most `most`; none while drafts do not pay."""
        if most <= 0 or len(context) < self._resumes_at:
            return []
        return look_up(context.kept_ids()[-_NUM_SEARCHED:], min(most, self._len))

    def observe(self, context_len: int, num_drafted: int, num_accepted: int, cost: float) -> None:
        """Learns from a draft that was verified.

        Args:
            context_len: of the session now.
            num_drafted: its tokens.
            num_accepted: those that were the chosen ones.
            cost: tokens that its step could have made in the time which the draft took.
        """
        is_accepted = num_accepted == num_drafted
        self._len = min(2 * self._len, _MOST_LEN) if is_accepted else max(num_accepted + 1, _LEAST_LEN)
        self._balance = min(self._balance + num_accepted - cost, _MOST_SAVED)
        if self._balance > 0:
            self._pause = _FIRST_PAUSE
        elif self._balance < -_MOST_LOST:
            self._balance = 0.0
            self._resumes_at = context_len + self._pause
            self._pause = min(2 * self._pause, _MOST_PAUSE)


def look_up(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """What came behind the longest repeated end of some tokens, the last time that it came.

    Args:
        token_ids: the tokens, whose end is looked up.
        num_tokens: how many to return. Where the repetition reaches to the end, it goes on with itself.

    Returns:
        `num_tokens` ids; none if the last tokens are new.
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    if len(ids) <= _LEAST_MATCH:
        return []
    places = np.flatnonzero(ids[:-1] == ids[-1])[-_NUM_PLACES:]
    found = None
    for length in range(2, _MOST_MATCH + 1):
        places = places[places >= length - 1]
        places = places[ids[places - length + 1] == ids[-length]]
        if not len(places):
            break
        if length >= _LEAST_MATCH:
            found = int(places[-1])
    if found is None:
        return []
    behind: list[int] = ids[found + 1 : found + 1 + num_tokens].tolist()
    period = len(ids) - 1 - found
    while len(behind) < num_tokens:
        behind.append(behind[-period])
    return behind
