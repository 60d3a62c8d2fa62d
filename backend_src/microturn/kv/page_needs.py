"""What sessions of a model take in pages: of keys and values, and of recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.state_track import StateTrack
from microturn.kv.tensors import KVTensors

# A pool has room for the recurrent states of a session for each so many tokens of KV, and for those of the longest.
_STATES_PER = 1024


@dataclass(frozen=True)
class PageNeeds:
    """The pages that sessions of a model take.

    Attributes:
        groups: of the model's attention layers.
        page_size: tokens in a page.
        page_bytes: of a page.
        window_slack: tokens that layers with a window of their own keep beyond it for rewinds.
        state_track: of its recurrent layers; None without any.
    """

    groups: LayerGroups
    page_size: int
    page_bytes: int
    window_slack: int
    state_track: StateTrack | None

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerShape],
        state_bytes: int,
        kv_dtype: torch.dtype,
        *,
        page_size: int,
        window_slack: int,
    ) -> Self:
        """The needs of a model.

        Args:
            layers: that attend.
            state_bytes: of a session's recurrent state; 0 without one.
            kv_dtype: of keys and values.
            page_size: see above, and `window_slack` likewise.
        """
        groups = LayerGroups.of(layers)
        page_bytes = page_size * KVTensors.bytes_per_token(groups.slots, kv_dtype)
        track = StateTrack.of(state_bytes, page_bytes, groups.num_groups, page_size) if state_bytes else None
        return cls(groups, page_size, page_bytes, window_slack, track)

    @property
    def token_bytes(self) -> int:
        """Bytes for one more token, with its share of the states."""
        num_pages = self.groups.num_groups * -(-_STATES_PER // self.page_size)
        return (num_pages + self._num_state_pages(_STATES_PER)) * self.page_bytes // _STATES_PER

    def num_pages(self, num_tokens: int, max_context: int, max_new: int) -> int:
        """Pages of a pool for so many tokens, and for the states of sessions that have them.

        Args:
            num_tokens: of all sessions.
            max_context: of the longest session.
            max_new: tokens of the longest step.
        """
        num_pages = self.groups.num_groups * -(-num_tokens // self.page_size)
        num_states_pages = num_tokens // _STATES_PER * self._num_state_pages(_STATES_PER)
        return num_pages + num_states_pages + self._num_state_pages(max_context, max_new)

    def session_bytes(self, num_tokens: int) -> int:
        """Bytes of a session of so many tokens between two turns, in which layers keep what their windows show."""
        of_kv = self.groups.session_pages(num_tokens, self.page_size, self.window_slack)
        return (of_kv + self._num_state_pages(num_tokens)) * self.page_bytes

    def _num_state_pages(self, num_tokens: int, max_new: int = 0) -> int:
        return 0 if self.state_track is None else self.state_track.most_pages(num_tokens, max_new)
