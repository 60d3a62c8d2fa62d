"""A session whose window slides, by transformers alone: the plain references of oracle 6.

The first, on a transformers cache, moves the other way than we do: what has been evicted is cut out of the cache, and
the keys behind it are turned back to the places next to the sinks, as StreamingLLM does. Positions never grow beyond
what is visible. The second need not know how layers rotate, and takes a model that nothing of ours has touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask

from microturn.kv.window import Window
from microturn.model import paged_attention as paged


@torch.inference_mode()
def windowed_logits(model: PreTrainedModel, ids: Sequence[int], window: Window) -> Tensor:
    """Logits [n, vocab_size] of all tokens, each seeing what the window shows it."""
    model.set_attn_implementation("sdpa")
    try:
        cache, logits, first, num_evicted = DynamicCache(), [], 0, 0
        while first < len(ids):
            _evict(model, cache, window.num_sinks, window.evicted(first) - num_evicted)
            num_evicted = window.evicted(first)
            last = min(len(ids), window.sees_less_from(first))
            at = torch.arange(first - num_evicted, last - num_evicted, device=model.device)
            given = torch.tensor([list(ids[first:last])], device=model.device)
            logits.append(model(input_ids=given, position_ids=at[None], past_key_values=cache).logits[0])
            first = last
        return torch.cat(logits)
    finally:
        model.set_attn_implementation(paged.IMPLEMENTATION)


def _evict(model: PreTrainedModel, cache: DynamicCache, num_sinks: int, distance: int) -> None:
    if not distance:
        return
    rotary = model.model.rotary_emb
    for layer, turning in zip(cache.layers, rotary.turnings, strict=True):
        cos, sin = rotary(layer.keys, torch.tensor([[distance]], device=model.device), turning.kind)
        keys = layer.keys[:, :, num_sinks + distance :]
        turned, rest = keys.tensor_split([cos.shape[-1]], dim=-1)  # part of a head may not be rotated
        first, second = turned.chunk(2, dim=-1)
        turned_back = torch.cat((turned * cos + torch.cat((second, -first), dim=-1) * sin, rest), dim=-1)
        layer.keys = torch.cat((layer.keys[:, :, :num_sinks], turned_back), dim=2)
        layer.values = torch.cat((layer.values[:, :, :num_sinks], layer.values[:, :, num_sinks + distance :]), dim=2)


@torch.inference_mode()
def pristine_windowed_logits(model: PreTrainedModel, ids: Sequence[int], window: Window) -> Tensor:
    """The same in one pass: the sinks are given anew for each distance that they move by, and see each other only.

    Args:
        model: as transformers loads it, with its attention "eager".
        ids: of all tokens.
        window: of the session.
    """
    evicted = [window.evicted(position) for position in range(len(ids))]
    # Of each token: its index, by how far it or the sinks that it sees have moved, and its position.
    moved = [(sink, by, sink + by) for by in sorted(set(evicted) - {0}) for sink in range(window.num_sinks)]
    indices, moved_by, positions = torch.tensor([*((at, by, at) for at, by in enumerate(evicted)), *moved]).T
    is_sink = indices < window.num_sinks
    sees_sink = is_sink & (moved_by[:, None] == moved_by)
    sees_other = ~is_sink[:, None] & ~is_sink & (indices >= window.num_sinks + moved_by[:, None])
    visible = sees_sink | sees_other

    def mask(*args: Any, mask_function: Callable[..., Tensor] = causal_mask_function, **kwargs: Any) -> Tensor:
        def at_places(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return mask_function(batch, head, positions[query], positions[key]) & visible[query, key]

        made: Tensor = eager_mask(*args, mask_function=at_places, **kwargs)
        return made

    AttentionMaskInterface.register("eager", mask)
    try:
        # With a mask, or positions that begin again would be taken for another sequence.
        given, ones = torch.tensor(ids)[indices][None], torch.ones(1, len(indices), dtype=torch.int64)
        logits: Tensor = model(
            input_ids=given, position_ids=positions[None], attention_mask=ones, use_cache=False
        ).logits[0]
    finally:
        AttentionMaskInterface.register("eager", eager_mask)
    return logits[: len(ids)]
