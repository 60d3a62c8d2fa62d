"""The least time that a pass or a turn can take: the bytes that it must read over what the card's memory gives.

Each weight is read once in a pass, and of each session's context the keys and values. Arithmetic is left out: with so
few rows it takes no longer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Roofline:
    """Of one model on one card.

    Attributes:
        weight_bytes: that a pass reads.
        kv_bytes_per_token: over all layers.
        bytes_per_s: that the card's memory gives.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    bytes_per_s: float

    def pass_ms(self, num_rows: int, context_len: float) -> float:
        """A pass over so many sessions of so many tokens."""
        num_bytes = self.weight_bytes + num_rows * context_len * self.kv_bytes_per_token
        return num_bytes / self.bytes_per_s * 1e3

    def turn_ms(self, num_rows: int, context_len: int, num_input: int, num_output: int) -> float:
        """A turn of so many sessions at once.

        Args:
            num_rows: sessions.
            context_len: tokens of each before the turn.
            num_input: appended by a pass of their own, which gives the first token.
            num_output: tokens generated, a pass for each of them.
        """
        lens = (context_len + num_input + number for number in range(num_output))
        return sum(self.pass_ms(num_rows, length) for length in lens)
