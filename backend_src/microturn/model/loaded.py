"""The result of loading a model on any device: its runner and its page pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.pool import PagePool
from microturn.kv.state_track import StateTrack
from microturn.kv.tensors import KVTensors
from microturn.model import recurrent
from microturn.model.cpu.layers import FusedLayers
from microturn.model.positions import num_positions_of
from microturn.model.runner import ModelRunner
from microturn.settings import Settings

# The pool has room for the recurrent states of a session for each so many tokens of KV, and for those of the longest.
_STATES_PER = 1024


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Attributes:
        runner: the model.
        needs: what its sessions take in pages.
        pool: its pages.
        kv_tokens: tokens that the pool was made for.
        max_context: maximum tokens of a session.
        weights: their type, by its name in the settings.
        attention: the attention kernels, by their name in the settings.
        no_fused_reason: why transformers' own layers run; None if ours do.
        no_int8_reason: why the weights are not in 8 bits, where they could have been; None otherwise.
        no_kernel_reason: why torch computes the attention, where that was not set; None otherwise.
    """

    runner: ModelRunner
    needs: PageNeeds
    pool: PagePool
    kv_tokens: int
    max_context: int
    weights: str
    attention: str
    no_fused_reason: str | None
    no_int8_reason: str | None
    no_kernel_reason: str | None

    @property
    def kv_dtype(self) -> str:
        """Type of the KV cache, by its name in the settings, but for 8-bit floats."""
        return str(self.runner.kv.layers[0].elements.dtype).removeprefix("torch.")

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return self.pool.num_pages * self.runner.kv.bytes_per_page

    @property
    def session_bytes(self) -> int:
        """Bytes of the pages of a session of `max_context` tokens, between two turns."""
        return self.needs.session_pages(self.max_context) * self.runner.kv.bytes_per_page

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory; a tensor that several modules share counts once."""
        held: dict[int, int] = {t.data_ptr(): t.nbytes for t in self.runner.model.parameters() if not t.is_meta}
        decoder = self.runner.decoder
        # In 8 bits they are copies, and those of the model have been released.
        copied = decoder.weight_bytes if self.weights == "int8" and isinstance(decoder, FusedLayers) else 0
        return sum(held.values()) + copied


@dataclass(frozen=True)
class PageNeeds:
    """What sessions of a model take in pages.

    Attributes:
        settings: with the page size and the longest step.
        groups: of the model's attention layers.
        page_bytes: of a page.
        state_track: of its recurrent layers; None without any.
    """

    settings: Settings
    groups: LayerGroups
    page_bytes: int
    state_track: StateTrack | None

    @classmethod
    def of(
        cls, model: PreTrainedModel, layers: Sequence[LayerShape], kv_dtype: torch.dtype, settings: Settings
    ) -> Self:
        """The needs of a model with these attention layers, for pages of a type."""
        groups = LayerGroups.of(layers)
        page_bytes = settings.page_size * KVTensors.bytes_per_token(groups.slots, kv_dtype)
        state_bytes, of_pages = recurrent.state_bytes(model), (page_bytes, groups.num_groups, settings.page_size)
        return cls(settings, groups, page_bytes, StateTrack.of(state_bytes, *of_pages) if state_bytes else None)

    @property
    def token_bytes(self) -> int:
        """Bytes for one more token, with its share of the states."""
        num_pages = self.groups.num_groups * -(-_STATES_PER // self.settings.page_size)
        return (num_pages + self._num_state_pages(_STATES_PER)) * self.page_bytes // _STATES_PER

    def num_pages(self, num_tokens: int, max_context: int) -> int:
        """Pages of a pool for so many tokens, and for the states of sessions that have them."""
        num_pages = self.groups.num_groups * -(-num_tokens // self.settings.page_size)
        num_states_pages = num_tokens // _STATES_PER * self._num_state_pages(_STATES_PER)
        return num_pages + num_states_pages + self._num_state_pages(max_context, self.settings.max_batch_tokens)

    def session_pages(self, num_tokens: int) -> int:
        """Pages of a session of so many tokens between two turns, in which layers keep what their windows show."""
        of_kv = self.groups.session_pages(num_tokens, self.settings.page_size, self.settings.window_slack)
        return of_kv + self._num_state_pages(num_tokens)

    def _num_state_pages(self, num_tokens: int, max_new: int = 0) -> int:
        return 0 if self.state_track is None else self.state_track.most_pages(num_tokens, max_new)


def size_pool(
    settings: Settings, model: PreTrainedModel, needs: PageNeeds, free_tokens: Callable[[int], int]
) -> tuple[PagePool, int, int]:
    """Creates the pool, and returns it with the tokens that it was made for and the maximum context.

    Args:
        settings: with the sizes.
        model: with the context that it was trained for.
        needs: of the model.
        free_tokens: returns for how many tokens there is memory, given the maximum context; called if it is not set.

    Raises:
        InvalidArgument: the set context is longer than the model can have.
    """
    trained = num_positions_of(model) or settings.max_context
    if settings.max_context > trained:
        raise InvalidArgument(f"setting 'max_context' is at most {trained}: {_why_not_longer(model)}")
    max_context = settings.max_context or trained
    kv_tokens = settings.kv_tokens
    if kv_tokens == 0:
        kv_tokens = free_tokens(max_context)
        max_context = max_context if settings.max_context else min(max_context, kv_tokens)
    return PagePool(needs.num_pages(kv_tokens, max_context), settings.page_size), kv_tokens, max_context


def _why_not_longer(model: PreTrainedModel) -> str:
    if num_positions_of(model) == getattr(model.config.get_text_config(), "max_position_embeddings", None):
        return "what the model was trained for"
    return "in longer contexts the model rotates all keys anew by their length"
