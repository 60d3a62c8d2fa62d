"""The tensors of recurrent layers in the bytes of a state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

# Every state begins with the position of the token behind it, so that a state of another position is found out.
_POSITION_BYTES = 8
_ALIGNMENT = 16


@dataclass(frozen=True)
class StatePart:
    """One tensor of a state.

    Attributes:
        layer: index of the layer, as the model counts.
        number: which of the layer's states, as its module counts.
        is_recurrent: whether it is the recurrent state, else the last inputs of a convolution.
        shape: of a sequence's; `dtype` of its elements.
        offset: in the state's bytes.
    """

    layer: int
    number: int
    is_recurrent: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def end(self) -> int:
        return self.offset + torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, states: Tensor) -> Tensor:
        """The tensors [sequences, ...], as a view of states' bytes, uint8 [sequences, bytes]."""
        return states[:, self.offset : self.end].view(self.dtype).view(len(states), *self.shape)


def parts_of(cache: Cache) -> Iterator[StatePart]:
    """The parts of a state, from a cache that a model has used for one sequence."""
    offset = _POSITION_BYTES
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        for is_recurrent, states in ((False, layer.conv_states), (True, layer.recurrent_states)):
            for number, tensor in states.items():
                if tensor is not None:
                    offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
                    part = StatePart(index, number, is_recurrent, tuple(tensor.shape[1:]), tensor.dtype, offset)
                    offset = part.end
                    yield part


def positions_of(states: Tensor) -> Tensor:
    """The position behind each state, int64 [sequences]."""
    return states[:, :_POSITION_BYTES].view(torch.int64)[:, 0]
