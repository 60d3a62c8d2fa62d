"""What a session without end still sees, as a function of the position alone.

    position   0         sinks                              p           the token at p sees
               | sinks   | evicted(p): seen no more | …     ■           ■ and all that is not evicted

    evicted    ────────────────┐ 0
                               └──────────┐ slack
                                          └──────────┐ 2 * slack
                               p grows ──▶

The first tokens stay because attention rests on them whatever they say (StreamingLLM, Xiao et al., 2023). The sinks
move up to the window: a token sees its keys at consecutive distances, as if nothing had stood between them, so no
distance is ever longer than what the model was trained for. Since nothing but the position decides, it does not matter
in which turns, steps or processes a sequence is computed.

Knows lengths; knows no pages and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

# Sinks where a session does not ask for another number: four are enough for all models that the paper tried.
DEFAULT_SINKS = 4


@dataclass(frozen=True)
class Window:
    """The rule of one session.

    Attributes:
        num_sinks: first tokens, which stay.
        length: last tokens, which stay; the newest is among them.
        slack: tokens that go at a time, once so many more than `length` are there.
    """

    num_sinks: int
    length: int
    slack: int

    @classmethod
    def of_whole_pages(cls, num_sinks: int, length: int, slack: int, *, page_size: int) -> Self:
        """A rule that evicts whole pages and no others: sinks and slack are rounded up."""
        return cls(-(-num_sinks // page_size) * page_size, length, -(-slack // page_size) * page_size)

    @property
    def max_visible(self) -> int:
        """Keys that a token sees at most, its own included."""
        return self.num_sinks + self.length + self.slack - 1

    @property
    def max_kept(self) -> int:
        """Tokens that are in the cache at most while no turn runs (see `droppable`)."""
        return self.max_visible + self.slack + 1

    def evicted(self, position: int) -> int:
        """Tokens behind the sinks that the token at a position does not see."""
        excess = position + 1 - self.num_sinks - self.length
        return max(0, excess // self.slack) * self.slack

    def sees_less_from(self, position: int) -> int:
        """The first position behind this one at which more is evicted."""
        return self.evicted(position) + self.max_visible

    def shortest_without(self, num_evicted: int) -> int:
        """The shortest context whose last token does not see so many tokens."""
        return self.num_sinks + self.length + num_evicted if num_evicted else 0

    def droppable(self, context_len: int) -> int:
        """Tokens behind the sinks that nobody needs when a context is so long and may be cut back by `slack` tokens.

        The last token that is left then is computed anew, so one more position counts.
        """
        return self.evicted(max(0, context_len - self.slack - 1))
