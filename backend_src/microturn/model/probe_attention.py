"""Compares our definition of attention with each layer's own implementation: scores and visible keys.

The comparison of logits in `probe` cannot find differences at distant positions only (a layer that attends within
chunks of 8,192 tokens) or with large scores only (soft caps: scores of a short random text are small). Here scores are
scaled up too, and the model's own mask is evaluated at positions all over a context, in one pass of a few tokens.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from microturn.kv.layer_groups import LayerShape
from microturn.model import dense_attention as dense
from microturn.model import paged_attention as paged
from microturn.model.positions import num_positions_of
from microturn.model.scores import Scores
from microturn.model.stock import untouched

log = logging.getLogger(__name__)

_IMPLEMENTATION = "microturn_watched"
# Norm of the difference relative to that of the layer's own result.
TOLERANCE = 1e-3
# The largest score of a layer after scaling: soft caps begin at 20 (Grok has 30, Gemma 2 has 50).
_LARGEST_SCORE = 60.0


class UnlikeOurs(Exception):
    """The model computes something else than our code; the argument says what."""


@torch.inference_mode()
def check_attention(model: PreTrainedModel, layers: Sequence[LayerShape]) -> None:
    """Compares every layer of a model.

    Args:
        model: prepared for us.
        layers: its layers' shapes.

    Raises:
        UnlikeOurs: a layer's attention differs.
    """
    positions = torch.tensor(_places(layers, num_positions_of(model) or 4096), device=model.device)
    ids = torch.arange(len(positions), device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    watched: set[int] = set()

    def watch(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        family = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if family is None:
            raise UnlikeOurs("layers have an attention that cannot be looked at")
        index = paged.layer_of(module)
        products = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(2, 3) * scaling
        louder = query * (_LARGEST_SCORE / products.abs().max()).clamp(1.0)
        scores = paged.scores_of(scaling, layers[index].window, kwargs)
        out: tuple[Tensor, Tensor | None]
        # As they are too: beside loud scores a sink logit that is left out would hardly count.
        for given in (louder, query):
            out = family(module, given, key, value, attention_mask, scaling=scaling, **kwargs)
            deviation = float((_attend(given, key, value, positions, scores) - out[0]).norm() / out[0].norm())
            log.debug("probe: attention of layer %d of %s deviates by %.1e", index, type(model).__name__, deviation)
            # Written so that NaN fails too.
            if not deviation <= TOLERANCE:
                seen = "all tokens before" if scores.window is None else f"the last {scores.window} tokens"
                raise UnlikeOurs(
                    f"layer {index} attends otherwise than by a softmax of scaled products over {seen}: results "
                    f"deviate by {deviation:.1e} (allowed: {TOLERANCE:.0e})"
                )
        watched.add(index)
        return out

    def mask(*args: Any, mask_function: Callable[..., Tensor] = causal_mask_function, **kwargs: Any) -> Tensor:
        def at_places(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask_function(batch, head, positions[query], positions[key])

        made: Tensor = eager_mask(*args, mask_function=at_places, **kwargs)
        return made

    AttentionInterface.register(_IMPLEMENTATION, watch)
    AttentionMaskInterface.register(_IMPLEMENTATION, mask)
    try:
        with untouched(model):
            model.set_attn_implementation(_IMPLEMENTATION)
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        # Registrations are permanent; these would keep the model alive.
        AttentionInterface.register(_IMPLEMENTATION, _nothing)
        AttentionMaskInterface.register(_IMPLEMENTATION, _nothing)
    if len(watched) != len(layers):
        raise UnlikeOurs(f"{len(watched)} of {len(layers)} layers attend where they can be watched")


def _nothing(*_args: Any, **_kwargs: Any) -> Any:
    """Registered outside of checks."""
    raise AssertionError("only a check watches layers")


def _attend(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scores: Scores) -> Tensor:
    """Our attention: [1, heads, tokens, head_dim] over the keys in the window, as [1, tokens, heads, …]."""
    distances = positions[:, None] - positions
    visible = distances >= 0 if scores.window is None else (distances >= 0) & (distances < scores.window)
    return dense.weigh(query[0], key[0], value[0], visible, scores).transpose(0, 1)[None]


def _places(layers: Sequence[LayerShape], num_positions: int) -> list[int]:
    """Positions at both ends of a context, at the ends of windows, and around powers of two."""
    edges = {num_positions, *(1 << power for power in range(num_positions.bit_length()))}
    for window in {layer.window for layer in layers if layer.window is not None}:
        edges |= {window, num_positions - window}
    return sorted({at + step for at in edges for step in (-1, 0) if 0 <= at + step < num_positions})
