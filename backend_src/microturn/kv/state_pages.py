"""Recurrent states in the pages of the KV cache.

A page is bytes of memory to a state: its parts in all tensors, one behind another. So states and keys come from one
pool, and whatever moves, copies or shares pages does so with states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StatePages:
    """Reads and writes states.

    Attributes:
        device: where the pages are.

    Args:
        tensors: all tensors of the pages, each [num_pages, ...], with a page's part in one piece.
        pages_per_state: how many of them one state takes.
    """

    def __init__(self, tensors: Sequence[Tensor], pages_per_state: int) -> None:
        self._parts = [tensor.view(len(tensor), -1).view(torch.uint8) for tensor in tensors]
        self._sizes = [part.shape[1] for part in self._parts]
        self._pages_per_state = pages_per_state
        self.device = self._parts[0].device

    def new_states(self, num_states: int) -> Tensor:
        """Allocates states in whole pages, uint8 [states, bytes]: zeros, as before the first token."""
        num_bytes = self._pages_per_state * sum(self._sizes)
        return torch.zeros(num_states, num_bytes, dtype=torch.uint8, device=self.device)

    def read(self, pages: Tensor) -> Tensor:
        """The states in some pages, uint8 [states, bytes].

        Args:
            pages: int64 [states, pages of a state].
        """
        return torch.cat([part[pages] for part in self._parts], dim=2).flatten(1)

    def write(self, pages: Tensor, states: Tensor) -> None:
        """Writes states, as `new_states` and `read` make them, into some pages."""
        by_page = states.view(-1, sum(self._sizes))
        for part, piece in zip(self._parts, torch.split(by_page, self._sizes, dim=1), strict=True):
            part.index_copy_(0, pages.flatten(), piece)
