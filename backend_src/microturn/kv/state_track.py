"""Which recurrent states of a session are kept, as plain numbers.

A recurrent layer (Mamba, gated delta net, short convolution) carries a state from token to token. A state cannot be cut
back, so some are kept on the way, in pages like those of keys and values::

    tokens    0       64      128     192     256     320  kv_len
    states    |       |   ■   |       |   ■   |   ■   |  □ |         ■ of a whole block   □ of the newest one

The pages of a *block* of tokens hold the state behind the last of them: of the newest block the state that the next
token needs, which is written again with each step; of the others one that stays. A session that is cut back goes on
from the last state before the cut, and computes the tokens between again.

The newest blocks are all kept, and the fewer the further back: the b-th block is kept for `num_dense` times as many
blocks as the largest power of `growth` that divides b. So a session keeps a number of states that grows with the
logarithm of its length, and a cut back by n tokens has some growth / (num_dense - 1) times as many computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

# Tokens between two states, at least: in whole pages.
LEAST_BLOCK = 64

# `num_dense` and `growth`: the first whose states take at most this share of the keys and values of so many tokens is
# taken, else the last.
_CHOICES = ((4, 2), (2, 2), (2, 8), (2, 64))
_SHARE, _SHARE_LEN = 0.1, 8192


def block_of(page_size: int) -> int:
    """Tokens of a block, for pages of `page_size` tokens."""
    return -(-LEAST_BLOCK // page_size) * page_size


@dataclass(frozen=True)
class StateTrack:
    """The states that are kept of one session: of the `older` blocks, and of all blocks behind the evicted tokens.

    It stands beside the `Track` of each kind of attention layers, and has its methods.

    Attributes:
        num_groups: pages of a state.
        block: tokens of a block; whole pages.
        num_dense: newest blocks that are all kept, besides the one that is being filled.
        growth: see above.
        older: numbers of the blocks before the evicted tokens' end whose states are kept, in order.
        num_evicted: tokens, in whole blocks, before the blocks that are all kept.
    """

    num_groups: int
    block: int
    num_dense: int
    growth: int
    older: tuple[int, ...] = ()
    num_evicted: int = 0

    num_sinks: ClassVar[int] = 0
    # The next token needs the newest state, and no other.
    window: ClassVar[int] = 1

    @classmethod
    def of(cls, state_bytes: int, page_bytes: int, num_groups: int, page_size: int) -> Self:
        """The track of an empty session.

        Args:
            state_bytes: of a state.
            page_bytes: of a page.
            num_groups: pages for the keys and values of `page_size` tokens.
            page_size: tokens in a page.
        """
        num_pages, block = -(-state_bytes // page_bytes), block_of(page_size)
        most_pages = _SHARE * num_groups * _SHARE_LEN / page_size
        tracks = [cls(num_pages, block, *choice) for choice in _CHOICES]
        return next((track for track in tracks if track.num_kept(_SHARE_LEN) * num_pages <= most_pages), tracks[-1])

    # ---- pages ---------------------------------------------------------------------------------------------------

    def unit(self, page_size: int) -> int:
        """Tokens that a page, or each of some pages, stands for."""
        return self.block

    def num_pages(self, length: int, page_size: int) -> int:
        """Pages for the kept states of `length` tokens."""
        return (len(self.older) + self._num_blocks(length)) * self.num_groups

    def page_numbers(self, length: int, page_size: int) -> NDArray[np.int64]:
        """Index of the last page of keys that each page's state covers, int64 [pages]."""
        first = self.num_evicted // self.block
        blocks = np.array([*self.older, *range(first, first + self._num_blocks(length))], np.int64)
        return np.repeat((blocks + 1) * (self.block // page_size) - 1, self.num_groups)

    def full_len(self, kv_len: int, page_size: int) -> int:
        """Tokens, of `kv_len`, whose pages are not written again."""
        return kv_len - kv_len % self.block

    def num_unseen(self, kv_len: int, page_size: int) -> int:
        """First tokens, in whole pages, whose states no token from position `kv_len` on needs."""
        return max(0, kv_len - page_size)

    def slid(self, kv_len: int, context_len: int, page_size: int) -> tuple[Self, list[slice]]:
        """The track without the states that are kept no longer, and their pages in the list."""
        first, newest = self.num_evicted // self.block, (kv_len - 1) // self.block
        first_dense = max(first, newest - self.num_dense)
        blocks = [*self.older, *range(first, first_dense)]
        kept = tuple(block for block in blocks if self._keeps(block, newest))
        hidden = [
            slice(index * self.num_groups, (index + 1) * self.num_groups)
            for index, block in enumerate(blocks)
            if block not in kept
        ]
        return replace(self, older=kept, num_evicted=first_dense * self.block), hidden

    def first_needed(self, kv_len: int) -> int:
        """Index in the list of the first page that a row from position `kv_len` on reads or writes."""
        if not kv_len:
            return 0
        if kv_len <= self.num_evicted:
            return (len(self.older) - 1) * self.num_groups
        return (len(self.older) + (kv_len - 1 - self.num_evicted) // self.block) * self.num_groups

    def most_pages(self, length: int, max_new: int) -> int:
        """The most pages that a session of up to `length` tokens has for states, with up to `max_new` in one step."""
        num_blocks, num_new = -(-length // self.block), -(-max_new // self.block) + 1
        return min(num_blocks, self.num_kept(length) + num_new) * self.num_groups

    def num_kept(self, length: int) -> int:
        """The most states of whole blocks that a session of up to `length` tokens keeps."""
        num_kept, reach = self.num_dense, self.num_dense
        while reach < length // self.block:
            # Of the next power there are so many multiples within its reach and beyond that of the power before.
            num_kept += -(-self.num_dense * (self.growth - 1) // self.growth)
            reach *= self.growth
        return num_kept

    # ---- tokens --------------------------------------------------------------------------------------------------

    def positions(self, kv_len: int) -> list[int]:
        """Where a session may be cut back to, at or before a position: behind the blocks that are kept, last first."""
        first = self.num_evicted // self.block
        ends = [block + 1 for block in (*self.older, *range(first, kv_len // self.block))]
        return [end * self.block for end in reversed(ends) if end * self.block <= kv_len]

    def reaches(self, kv_len: int) -> bool:
        """Whether there is a state of a whole block just before position `kv_len`."""
        return kv_len % self.block == 0 and self.holds(kv_len)

    def holds(self, kv_len: int) -> bool:
        """Whether the state of the last of `kv_len` tokens is kept."""
        return not kv_len or kv_len > self.num_evicted or kv_len // self.block - 1 in self.older

    def cut(self, kv_len: int) -> Self:
        """The track after every token from position `kv_len` on is dropped; requires `reaches(kv_len)`."""
        older = tuple(block for block in self.older if block < kv_len // self.block)
        return replace(self, older=older, num_evicted=min(self.num_evicted, kv_len))

    def _keeps(self, block: int, newest: int) -> bool:
        """Whether the state of a whole block is kept while tokens of the newest one come."""
        reach, number = self.num_dense, block + 1
        while reach < newest - block and number % self.growth == 0:
            reach, number = reach * self.growth, number // self.growth
        return newest - block <= reach

    def _num_blocks(self, length: int) -> int:
        """Blocks of `length` tokens behind the evicted ones."""
        return max(0, -(-(length - self.num_evicted) // self.block))
