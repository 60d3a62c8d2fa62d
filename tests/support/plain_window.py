"""A session whose window slides, on a transformers cache: the plain reference of oracle 6.

It moves the other way than we do: what has been evicted is cut out of the cache, and the keys behind it are turned
back to the places next to the sinks, as StreamingLLM does. Positions never grow beyond what is visible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

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
        first, second = keys.chunk(2, dim=-1)
        turned_back = keys * cos + torch.cat((second, -first), dim=-1) * sin
        layer.keys = torch.cat((layer.keys[:, :, :num_sinks], turned_back), dim=2)
        layer.values = torch.cat((layer.values[:, :, :num_sinks], layer.values[:, :, num_sinks + distance :]), dim=2)
