"""What an answer must match: one of some grammars, as a value of a schema or calls of tools.

Each is followed by a matcher of its own, which drops out at the first token that it does not allow. As alternatives of
one grammar in Lark they would not be the same: the library's lexer takes the longest lexeme that has begun, so where a
call begins with the text `{"name": "f", ` no JSON object with another key would go on behind `{"`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from microturn.errors import FailedPrecondition, MicroturnError
from microturn.text.grammar import Grammar, Matcher


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammars of which an answer matches one.

    Attributes:
        alternatives: at least one, all of one model's.
    """

    alternatives: tuple[Grammar, ...]

    @property
    def fault(self) -> MicroturnError | None:
        """Why no turn may use it any more."""
        return next((grammar.fault for grammar in self.alternatives if grammar.fault is not None), None)

    def begin(self, token_ids: Sequence[int] = ()) -> AnswerMatcher:
        """A matcher of an answer that begins with these tokens, by whichever grammars it may.

        Raises:
            FailedPrecondition: by none of them; says why not by the first.
            InvalidArgument: a grammar has blown up.
        """
        matchers: list[Matcher] = []
        refusals: list[FailedPrecondition] = []
        for grammar in self.alternatives:
            try:
                matchers.append(grammar.begin(token_ids))
            except FailedPrecondition as refusal:
                refusals.append(refusal)
        if not matchers:
            raise refusals[0]
        return AnswerMatcher(matchers)


class AnswerMatcher:
    """Follows one answer.

    Args:
        matchers: those that it may still go by, at least one.
    """

    def __init__(self, matchers: Sequence[Matcher]) -> None:
        self._matchers = matchers

    @property
    def is_complete(self) -> bool:
        """Whether the answer is a whole value, and ends."""
        return any(matcher.is_complete for matcher in self._matchers)

    def allowed(self, banned_ids: Collection[int] = ()) -> NDArray[np.uint32]:
        """The tokens that may come next, a bit for each, the lowest first: uint32 [vocab_size / 32, rounded up].

        Args:
            banned_ids: not allowed, unless nothing else is.
        """
        words: NDArray[np.uint32] = np.bitwise_or.reduce([matcher.allowed for matcher in self._matchers])
        if not banned_ids:
            return words
        others = words.copy()
        for token_id in banned_ids:
            if token_id < 32 * len(others):
                others[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return others if others.any() else words

    def accept(self, token_id: int) -> None:
        """Goes on behind a token that is allowed.

        Raises:
            InvalidArgument: a grammar has blown up.
        """
        self._matchers = [matcher for matcher in self._matchers if matcher.allows(token_id)]
        assert self._matchers, f"token {token_id} is not allowed"
        for matcher in self._matchers:
            matcher.accept(token_id)
