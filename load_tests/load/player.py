"""Whoever plays out what is generated, a speaker say, and how long they starve for want of tokens.

Playing begins with the first token, without a buffer, and takes the same time for each. When the next token is not
there once all before it have been played, that is an underrun: the player stands still until it comes. The wait for the
first token is no underrun; it is measured as the time to the first token.
"""

from __future__ import annotations


class Player:
    """Plays tokens as they arrive.

    Args:
        token_s: seconds that a token plays.
    """

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s
        self._played_to_s: float | None = None

    def arrive(self, at_s: float, num_tokens: int) -> float:
        """Tokens arrive.

        Args:
            at_s: when, by any clock.
            num_tokens: at least one.

        Returns:
            Seconds that the player stood still before them; 0 where there was no underrun.
        """
        starved_s = 0.0 if self._played_to_s is None else max(0.0, at_s - self._played_to_s)
        begins_s = at_s if self._played_to_s is None else max(at_s, self._played_to_s)
        self._played_to_s = begins_s + num_tokens * self._token_s
        return starved_s

    def num_heard(self, at_s: float, num_arrived: int) -> int:
        """How many of the tokens that arrived so far have been played to their end."""
        left_s = 0.0 if self._played_to_s is None else max(0.0, self._played_to_s - at_s)
        return max(0, num_arrived - int(-(-left_s // self._token_s)))

    def end(self) -> None:
        """The answer is over: what comes next is another one, and nobody starves in between."""
        self._played_to_s = None
