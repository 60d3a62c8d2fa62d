"""What loading a model comes to, on whatever device: a runner that is ready, and its pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv_pool import PagePool
from microturn.runner import ModelRunner
from microturn.settings import Settings


@dataclass(frozen=True)
class Loaded:
    """A model as it is served.

    Attributes:
        runner: the model.
        pool: its pages.
        max_context: tokens that a session may hold at most; they fit the pool.
        weights: their type, by the name that the setting has for it.
        attention: likewise, whose kernels attend.
    """

    runner: ModelRunner
    pool: PagePool
    max_context: int
    weights: str
    attention: str


def size_pool(
    settings: Settings, model: PreTrainedModel, num_groups: int, free_tokens: Callable[[int], int]
) -> tuple[PagePool, int]:
    """The pool, and the longest context that a session may have.

    Args:
        settings: they say how large.
        model: it says what it was trained for.
        num_groups: of layers; each takes a page for the same tokens.
        free_tokens: for how many tokens there is memory, for a longest context; asked where the settings leave it open.

    Raises:
        InvalidArgument: a longer context is set than the model was trained for.
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
