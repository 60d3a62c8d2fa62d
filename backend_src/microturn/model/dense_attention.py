"""Attention through torch's own kernel over keys gathered from the pages, on any device, in float32.

The reference for the native kernel and for FlashInfer's, and the fallback where those cannot run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from microturn.kv.tensors import LayerPages
from microturn.model.paged_step import PagedStep
from microturn.model.rotary import Rotation


def append(kv: LayerPages, k: Tensor, v: Tensor, step: PagedStep) -> None:
    """Writes new keys and values, each [tokens, kv_heads, head_dim], into their pages."""
    slots = torch.from_numpy(step.slots).to(k.device)
    kv.put(slots // step.page_size, slots % step.page_size, k, v)


def attend(
    q: Tensor,
    kv: LayerPages,
    step: PagedStep,
    scale: float,
    window: int | None,
    rotation: Callable[[Tensor], Rotation],
    out: Tensor,
) -> None:
    """Attends the queries of all rows; q and out are [tokens, heads, head_dim].

    `rotation` by distances [n] rotates keys [n, kv_heads, head_dim]: those of moved sinks.
    """
    device = q.device
    for row in range(len(step.context_len)):
        first, last = int(step.query_indptr[row]), int(step.query_indptr[row + 1])
        context_len = int(step.context_len[row])
        position = context_len - (last - first)
        page_ids = torch.from_numpy(step.page_ids[step.page_indptr[row] : step.page_indptr[row + 1]]).to(device)
        oldest = 0 if window is None else max(0, position - window + 1)
        oldest -= oldest % step.page_size
        pages = kv.decode(page_ids[oldest // step.page_size :].long())
        keys, values = (pages[:, part].transpose(1, 2).flatten(0, 1)[: context_len - oldest] for part in (0, 1))
        num_sinks = max(0, int(step.num_sinks[row]) - oldest)
        if num_sinks:
            moved_by = torch.full((num_sinks,), int(step.num_evicted[row]), device=device)
            keys = torch.cat((rotation(moved_by)(keys[:num_sinks]), keys[num_sinks:]))
        at = torch.arange(oldest, context_len, device=device)
        query_at = torch.arange(position, context_len, device=device)[:, None]
        visible = at <= query_at
        if window is not None:
            visible &= at > query_at - window
        attended = F.scaled_dot_product_attention(
            q[first:last].float().transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf")),
            scale=scale,
            enable_gqa=True,
        )
        out[first:last] = attended[0].transpose(0, 1)
