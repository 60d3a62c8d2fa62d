"""The pages that the check of a model at load computes with: two sessions, and one page for padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.quantization import LayerScales
from microturn.kv.state_track import StateTrack, block_of
from microturn.kv.tensors import KVTensors
from microturn.model import recurrent
from microturn.model.batch import Row

PAGE_SIZE = 16
# A longer sliding window is not tested to its end: that would take minutes on a large model.
_LONGEST = 640


def new_pages(
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: PageLayout = PageLayout.HND,
    float8: Sequence[LayerScales] | None = None,
) -> KVTensors:
    """Pages for two probes, and one for padding."""
    state_bytes, length = recurrent.state_bytes(model), probe_len(layers)
    track = StateTrack.of(state_bytes, PAGE_SIZE * KVTensors.bytes_per_token(layers, dtype), 1, PAGE_SIZE)
    num_pages = 2 * (-(-length // PAGE_SIZE) + track.num_pages(length, PAGE_SIZE)) + 1
    return KVTensors(layers, num_pages, PAGE_SIZE, dtype, device, layout=layout, state_bytes=state_bytes, float8=float8)


def probe_len(layers: Sequence[LayerShape]) -> int:
    """Tokens of a probe: enough for the longest window that is tested to its end."""
    windows = [layer.window for layer in layers if layer.window is not None]
    return max([96, *(window + 48 for window in windows if window + 48 <= _LONGEST)])


@dataclass(frozen=True)
class SessionPages:
    """The pages of a session, and those of its states (see `Row.states`)."""

    pages: Sequence[int]
    states: NDArray[np.int32] | None

    @classmethod
    def of(cls, kv: KVTensors, pages: Sequence[int], num_tokens: int) -> Self:
        num_pages = -(-num_tokens // PAGE_SIZE)
        return cls(pages[:num_pages], kv.new_state_pages(num_tokens, iter(pages[num_pages:])))

    def row(self, ids: Sequence[int], first: int) -> Row:
        """A row of new tokens from position `first` on, with as many of the pages as it needs."""
        states = None if self.states is None else self.states[max(0, first - 1) // block_of(PAGE_SIZE) :]
        return Row(ids, first, self.pages[: -(-(first + len(ids)) // PAGE_SIZE)], states=states)
