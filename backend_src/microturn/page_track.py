"""Which tokens of a session the layers of one kind keep: plain numbers, fit for a file.

    tokens         0                                                  kv_len
    sees all       | sinks | evicted: kept no more |  kept                 |
    window of w    |  evicted               | slack | w - 1, kept          |

Layers that see all keep what their session's window (see `Window`) has not evicted. Layers with a window of their own
keep what that shows, and some more, so that the session can be cut back. Theirs starts afresh at no sinks: nothing of
it moves.

Knows lengths; knows no page ids and no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from microturn.layer_groups import LayerKind
from microturn.window import Window


@dataclass(frozen=True)
class Track:
    """What one kind of layers keeps of one session.

    The layers' groups have a page each for the same tokens, which come and go together: in a list of pages they stand
    next to each other.

    Attributes:
        num_groups: pages for the same tokens.
        window: tokens that a token sees, itself included; None is what its session shows.
        slack: tokens that the session may be cut back by without computing anything again; where it has a window.
        num_sinks: first tokens, which are never evicted; they fill whole pages.
        num_evicted: tokens behind them that are not in the cache any more; whole pages.
        origin: where it begins behind the sinks, as if nothing had ever stood between; 0 is with the first token.
    """

    num_groups: int = 1
    window: int | None = None
    slack: int = 0
    num_sinks: int = 0
    num_evicted: int = 0
    origin: int = 0

    @classmethod
    def of(cls, kind: LayerKind, window: Window | None, slack: int, page_size: int) -> Self:
        """What a kind of layers keeps of a session that has nothing yet.

        Args:
            kind: the layers.
            window: of the session.
            slack: tokens that a session without a window is cut back by, most often at most.
            page_size: tokens in a page.
        """
        if kind.window is not None and window is None:
            return cls(kind.num_groups, kind.window, -(-slack // page_size) * page_size)
        # Behind an eviction layers that look back further than the session's window would see the sinks again, which
        # have moved up. Those that look back less far never do. They keep no more than the session's window does: a
        # page less than it, since what they give up is rounded to pages; and it lets nobody go back further.
        if kind.window is not None and window is not None and kind.window + page_size <= window.length:
            return cls(kind.num_groups, kind.window, 2 * window.slack)
        return cls(kind.num_groups, num_sinks=0 if window is None else window.num_sinks)

    # ---- pages ---------------------------------------------------------------------------------------------------

    def num_pages(self, length: int, page_size: int) -> int:
        """Pages for what it keeps of so many tokens."""
        return -(-(length - self.num_evicted) // page_size) * self.num_groups

    def page_numbers(self, length: int, page_size: int) -> NDArray[np.int64]:
        """Which page of so many tokens, if all were kept, each page in its list is: int64 [pages]."""
        numbers = np.arange(-(-(length - self.num_evicted) // page_size))
        numbers[self.num_sinks // page_size :] += self.num_evicted // page_size
        return np.repeat(numbers, self.num_groups)

    def hidden_pages(self, num_evicted: int, page_size: int) -> slice:
        """Which pages in its list go when so many tokens are evicted in all."""
        assert num_evicted >= self.num_evicted, "evicted tokens are asked for"
        first = self.num_sinks // page_size * self.num_groups
        return slice(first, first + (num_evicted - self.num_evicted) // page_size * self.num_groups)

    # ---- tokens --------------------------------------------------------------------------------------------------

    def num_unseen(self, kv_len: int, page_size: int) -> int:
        """First tokens, in whole pages, that nobody sees of those computed behind so many."""
        return 0 if self.window is None else max(0, kv_len - self.window + 1) // page_size * page_size

    @property
    def num_hidden(self) -> int:
        """Tokens behind the sinks that no token sees, wherever it stands."""
        return max(0, self.origin - self.num_sinks)

    def from_origin(self, origin: int) -> Self:
        """Behind the sinks, and going on at a later position as if nothing had ever stood between."""
        return replace(self, num_evicted=origin - self.num_sinks, origin=origin)

    def reaches(self, kv_len: int) -> bool:
        """Whether all is kept that the next token sees if every token from position `kv_len` on is forgotten."""
        if not self.num_evicted or kv_len <= self.num_sinks:
            return True
        if self.num_evicted == self.num_hidden:
            return kv_len >= self.origin
        return kv_len >= self.num_evicted + (self.num_sinks if self.window is None else self.window - 1)

    def cut(self, kv_len: int) -> Self:
        """What is kept when every token from position `kv_len` on is forgotten; it must reach there."""
        return replace(self, num_evicted=0, origin=0) if kv_len <= self.num_sinks else self
