"""The sliding window of a session with attention sinks, as a function of the position alone.

    position   0         sinks                              p           the token at p sees
               | sinks   | evicted(p)               | …     ■           ■ and all that is not evicted

    evicted    ────────────────┐ 0
                               └──────────┐ slack
                                          └──────────┐ 2 * slack
                               p grows ──▶

The first tokens stay because attention concentrates on them whatever they say (StreamingLLM, Xiao et al., 2023). The
sinks move up to the window: a token sees its keys at consecutive distances, so that no distance exceeds what the model
was trained for. Since only the position decides, the result does not depend on turns, steps or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

# Default number of sinks: four are enough for all models in the paper.
DEFAULT_SINKS = 4


@dataclass(frozen=True)
class Window:
    """The window of one session.

    Attributes:
        num_sinks: first tokens, never evicted.
        length: last tokens that are always visible, the newest included.
        slack: tokens that are evicted at a time, once there are that many more than `length`.
    """

    num_sinks: int
    length: int
    slack: int

    @classmethod
    def of_whole_pages(cls, num_sinks: int, length: int, slack: int, *, page_size: int) -> Self:
        """A window that evicts whole pages only: sinks and slack are rounded up."""
        return cls(-(-num_sinks // page_size) * page_size, length, -(-slack // page_size) * page_size)

    @property
    def max_visible(self) -> int:
        """Maximum keys that a token sees, its own included."""
        return self.num_sinks + self.length + self.slack - 1

    @property
    def max_kept(self) -> int:
        """Maximum tokens in the cache while no turn runs (see `droppable`)."""
        return self.max_visible + self.slack + 1

    def evicted(self, position: int) -> int:
        """Tokens behind the sinks that the token at a position does not see."""
        excess = position + 1 - self.num_sinks - self.length
        return max(0, excess // self.slack) * self.slack

    def sees_less_from(self, position: int) -> int:
        """The first position after this one at which more is evicted."""
        return self.evicted(position) + self.max_visible

    def shortest_without(self, num_evicted: int) -> int:
        """The shortest context whose last token does not see `num_evicted` tokens."""
        return self.num_sinks + self.length + num_evicted if num_evicted else 0

    def droppable(self, context_len: int) -> int:
        """Tokens behind the sinks that a context of `context_len` tokens does not need, even if cut back by `slack`.

        After a cut the last token is recomputed, so that one more position counts.
        """
        return self.evicted(max(0, context_len - self.slack - 1))
