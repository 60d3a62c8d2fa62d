"""Attention through torch's own kernel over keys gathered from the pages, on any device, in float32.

The reference for the native kernel and for FlashInfer's, and the fallback where those cannot run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from microturn.kv.layer_pages import LayerPages
from microturn.model.paged_step import PagedStep
from microturn.model.rotary import Rotation
from microturn.model.scores import Scores, soft_capped


def append(kv: LayerPages, k: Tensor, v: Tensor, step: PagedStep) -> None:
    """Writes new keys and values, each [tokens, kv_heads, head_dim], into their pages."""
    slots = torch.from_numpy(step.slots).to(k.device)
    kv.put(slots // step.page_size, slots % step.page_size, k, v)


def attend(
    q: Tensor,
    kv: LayerPages,
    step: PagedStep,
    scores: Scores,
    rotation: Callable[[Tensor], Rotation],
    out: Tensor,
) -> None:
    """Attends the queries of all rows; q and out are [tokens, heads, head_dim].

    `rotation` by distances [n] rotates keys [n, kv_heads, head_dim]: those of moved sinks.
    """
    device, window = q.device, scores.window
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
        queries, keys, values = (part.transpose(0, 1) for part in (q[first:last].float(), keys, values))
        out[first:last] = weigh(queries, keys, values, visible, scores).transpose(0, 1)


def weigh(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """The values, weighted for each query: the definition of attention.

    Args:
        q: float32 [heads, queries, head_dim].
        keys: float32 [kv_heads, n, head_dim].
        values: float32 [kv_heads, n, value_dim].
        visible: bool [queries, n], the keys that a query sees; the window of `scores` is not looked at.
        scores: of the layer.

    Returns:
        float32 [heads, queries, value_dim].
    """
    if scores.soft_cap is None and scores.sink_logits is None:
        hidden = torch.zeros(visible.shape, device=q.device).masked_fill_(~visible, float("-inf"))
        return F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=hidden, scale=scores.scale, enable_gqa=True
        )[0]
    keys, values = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (keys, values))
    logits = soft_capped(q @ keys.transpose(1, 2) * scores.scale, scores.soft_cap)
    logits = logits.masked_fill(~visible, float("-inf"))
    if scores.sink_logits is not None:
        logits = torch.cat((logits, scores.sink_logits[:, None, None].expand(-1, q.shape[1], 1)), dim=-1)
    return logits.softmax(dim=-1)[..., : keys.shape[1]] @ values
