"""The result of loading a model on any device: its runner and its page pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_needs import PageNeeds
from microturn.kv.pool import PagePool
from microturn.model import recurrent
from microturn.model.positions import num_positions_of
from microturn.model.runner import ModelRunner, TransformerLayers
from microturn.settings import Settings


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
        return self.needs.session_bytes(self.max_context)

    @property
    def layers(self) -> str:
        """What computes the layers: transformers, our fused operations, or one compiled call for all of them."""
        decoder = self.runner.decoder
        if decoder is None:
            return "transformers"
        is_one_call = decoder.is_compiled and self.attention == "native"
        return "compiled" if is_one_call else "fused"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory, of all processes."""
        own = weight_bytes_of(self.runner.model, self.runner.decoder, self.weights)
        return own + self.runner.other_weight_bytes


def weight_bytes_of(model: PreTrainedModel, decoder: TransformerLayers | None, weights: str) -> int:
    """Bytes of the weights of a model and its layers in memory; a tensor that several modules share counts once."""
    held: dict[int, int] = {t.data_ptr(): t.nbytes for t in model.parameters() if not t.is_meta}
    # In 8 bits they are copies, and those of the model have been released.
    copied = decoder.weight_bytes if weights == "int8" and decoder is not None else 0
    return sum(held.values()) + copied


def needs_of(
    model: PreTrainedModel, layers: Sequence[LayerShape], kv_dtype: torch.dtype, settings: Settings
) -> PageNeeds:
    """What sessions of a model with these attention layers take, in pages of a type."""
    state_bytes = recurrent.state_bytes(model)
    return PageNeeds.of(layers, state_bytes, kv_dtype, page_size=settings.page_size, window_slack=settings.window_slack)


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
    num_pages = needs.num_pages(kv_tokens, max_context, settings.max_batch_tokens)
    return PagePool(num_pages, settings.page_size), kv_tokens, max_context


def _why_not_longer(model: PreTrainedModel) -> str:
    if num_positions_of(model) == getattr(model.config.get_text_config(), "max_position_embeddings", None):
        return "what the model was trained for"
    return "in longer contexts the model rotates all keys anew by their length"
