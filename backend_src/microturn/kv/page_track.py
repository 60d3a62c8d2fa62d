"""Which tokens of a session the layers of one kind keep, as plain numbers.

    tokens         0                                                  kv_len
    full           | sinks | evicted               |  kept                 |
    window of w    |  evicted               | slack | w - 1, kept          |

Layers with full attention keep what the session's window (see `Window`) has not evicted. Layers with a window of their
own keep what that shows, and the slack, so that the session can be cut back. They keep no sinks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from microturn.kv.layer_groups import LayerKind
from microturn.kv.window import Window


@dataclass(frozen=True)
class Track:
    """The tokens that one kind of layers keeps of one session.

    Each group of the kind has a page for the same tokens. These are allocated and released together and lie next to
    each other in the page list.

    Attributes:
        num_groups: of the kind: pages for the same tokens.
        window: tokens that a token sees, itself included; None is all that the session's window shows.
        slack: tokens that the session may be cut back by without recomputing; only with a window.
        num_sinks: first tokens, never evicted; whole pages.
        num_evicted: tokens behind the sinks that are no longer in the cache; whole pages.
        origin: position of the first token behind the sinks, as if there had been none between; 0 is the beginning.
        num_shown: last tokens, itself included, that the session's window always shows a token; 0 is no window.
    """

    num_groups: int = 1
    window: int | None = None
    slack: int = 0
    num_sinks: int = 0
    num_evicted: int = 0
    origin: int = 0
    num_shown: int = 0

    @classmethod
    def of(cls, kind: LayerKind, window: Window | None, slack: int, page_size: int) -> Self:
        """The track of an empty session.

        Args:
            kind: the layers.
            window: of the session.
            slack: tokens that a session without a window is usually cut back by at most.
            page_size: tokens in a page.
        """
        if kind.window is not None and window is None:
            return cls(kind.num_groups, kind.window, -(-slack // page_size) * page_size)
        # After an eviction, layers whose window is longer than the session's see the sinks again, which have moved up;
        # layers with a shorter window never do. These keep a page less than the session's window, since what they
        # release is rounded to pages, and the session cannot be cut back further anyway.
        if kind.window is not None and window is not None and kind.window + page_size <= window.length:
            return cls(kind.num_groups, kind.window, 2 * window.slack)
        if window is None:
            return cls(kind.num_groups)
        return cls(kind.num_groups, num_sinks=window.num_sinks, num_shown=window.length)

    # ---- pages ---------------------------------------------------------------------------------------------------

    def unit(self, page_size: int) -> int:
        """Tokens that a page, or each of some pages, stands for."""
        return page_size

    def full_len(self, kv_len: int, page_size: int) -> int:
        """Tokens, of `kv_len`, whose pages are not written again."""
        return kv_len - kv_len % page_size

    def num_pages(self, length: int, page_size: int) -> int:
        """Pages for the kept ones of `length` tokens."""
        return -(-(length - self.num_evicted) // page_size) * self.num_groups

    def page_numbers(self, length: int, page_size: int) -> NDArray[np.int64]:
        """Index of each page in the list if all of `length` tokens were kept, int64 [pages]."""
        numbers = np.arange(-(-(length - self.num_evicted) // page_size))
        numbers[self.num_sinks // page_size :] += self.num_evicted // page_size
        return np.repeat(numbers, self.num_groups)

    def hidden_pages(self, num_evicted: int, page_size: int) -> slice:
        """The pages in the list to remove when `num_evicted` tokens are evicted in all."""
        assert num_evicted >= self.num_evicted, "evicted tokens are asked for"
        first = self.num_sinks // page_size * self.num_groups
        return slice(first, first + (num_evicted - self.num_evicted) // page_size * self.num_groups)

    def slid(self, kv_len: int, context_len: int, page_size: int) -> tuple[Self, list[slice]]:
        """The track without the pages that layers with a window see no longer, and these pages in the list.

        Args:
            kv_len: tokens in the cache.
            context_len: tokens, of which the slack stays in reach.
            page_size: tokens in a page.
        """
        num_unseen = self.num_unseen(min(kv_len, context_len - self.slack - 1), page_size)
        if num_unseen <= self.num_evicted:
            return self, []
        return replace(self, num_evicted=num_unseen), [self.hidden_pages(num_unseen, page_size)]

    # ---- tokens --------------------------------------------------------------------------------------------------

    def num_unseen(self, kv_len: int, page_size: int) -> int:
        """First tokens, in whole pages, that no token from position `kv_len` on sees."""
        return 0 if self.window is None else max(0, kv_len - self.window + 1) // page_size * page_size

    @property
    def num_hidden(self) -> int:
        """Tokens behind the sinks that no token sees, at any position."""
        return max(0, self.origin - self.num_sinks)

    def from_origin(self, origin: int) -> Self:
        """The track that continues at position `origin` as if there had been no tokens between the sinks and it."""
        return replace(self, num_evicted=origin - self.num_sinks, origin=origin)

    def positions(self, kv_len: int) -> list[int]:
        """Where alone a session may be cut back to, at or before a position; empty if anywhere."""
        return []

    def holds(self, kv_len: int) -> bool:
        """Whether all that the token at position `kv_len` sees is kept."""
        return self.reaches(kv_len)

    def reaches(self, kv_len: int) -> bool:
        """Whether all that the next token sees is kept if every token from position `kv_len` on is dropped."""
        if not self.num_evicted or kv_len <= self.num_sinks:
            return True
        if self.num_evicted == self.num_hidden:
            return kv_len >= self.origin
        if self.window is not None:
            return kv_len >= self.num_evicted + self.window - 1
        # A token before this one sees some of what is evicted, since the session's window slides by positions.
        return kv_len >= self.num_sinks + self.num_evicted + max(0, self.num_shown - 1)

    def cut(self, kv_len: int) -> Self:
        """The track after every token from position `kv_len` on is dropped; requires `reaches(kv_len)`."""
        return replace(self, num_evicted=0, origin=0) if kv_len <= self.num_sinks else self
