"""The result of loading a model on any device: its runner and its page pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.pool import PagePool
from microturn.model.runner import ModelRunner
from microturn.settings import Settings


@dataclass(frozen=True)
class Loaded:
    """A loaded model.

    Attributes:
        runner: the model.
        pool: its pages.
        max_context: maximum tokens of a session; they fit the pool.
        weights: their type, by its name in the settings.
        attention: the attention kernels, by their name in the settings.
    """

    runner: ModelRunner
    pool: PagePool
    max_context: int
    weights: str
    attention: str


def size_pool(
    settings: Settings, model: PreTrainedModel, num_groups: int, free_tokens: Callable[[int], int]
) -> tuple[PagePool, int]:
    """Creates the pool, and returns it with the maximum context.

    Args:
        settings: with the sizes.
        model: with the context that it was trained for.
        num_groups: groups of layers; each has a page for the same tokens.
        free_tokens: returns for how many tokens there is memory, given the maximum context; called if it is not set.

    Raises:
        InvalidArgument: the set context is longer than the model was trained for.
    """
    trained = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0)) or settings.max_context
    if settings.max_context > trained:
        raise InvalidArgument(f"setting 'max_context' is at most {trained}, what the model was trained for")
    max_context = settings.max_context or trained
    kv_tokens = settings.kv_tokens
    if kv_tokens == 0:
        kv_tokens = free_tokens(max_context)
        max_context = max_context if settings.max_context else min(max_context, kv_tokens)
    return PagePool(num_groups * -(-kv_tokens // settings.page_size), settings.page_size), max_context
