"""Attention written out in plain torch, and the comparison of a kernel with it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.quantization import dequantize
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row
from microturn.model.cpu.attention_operands import HAS_BFLOAT16
from microturn.model.cpu.integer_products import HAS_VNNI
from microturn.model.cpu.rotation import block_of
from microturn.model.paged_attention import PagedAttention
from microturn.model.scores import Scores
from support.rounded import rotated


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads} on {self.num_kv_heads} of {self.head_dim}"


def check_rows(
    heads: Heads,
    page_size: int,
    rows: list[tuple[int, int]],
    window: int | None,
    *,
    use_native: bool,
    dtype: torch.dtype = torch.float32,
    soft_cap: float | None = None,
    sink_logits: Tensor | None = None,
) -> None:
    """Each row is (tokens in the cache, new tokens); its pages are scattered over the pool."""
    scores = Scores(heads.head_dim**-0.5, window, soft_cap, sink_logits)
    generator = torch.Generator().manual_seed(1)
    num_pages = [-(-(cached + new) // page_size) for cached, new in rows]
    scattered = torch.randperm(sum(num_pages) + 3, generator=generator).tolist()
    layout = PageLayout.PANELS if use_native else PageLayout.HND
    shape = LayerShape(heads.num_kv_heads, heads.head_dim, window)
    kv = KVTensors([shape], len(scattered), page_size, dtype, layout=layout)
    pool = kv.layers[0]
    (pool.scales if dtype == torch.int8 else pool.elements).fill_(
        float("nan")
    )  # who reads what nobody wrote is found out
    histories: list[tuple[Tensor, Tensor]] = []
    batch_rows, queries, new_keys, new_values = [], [], [], []
    for (cached, new), count in zip(rows, num_pages, strict=True):
        pages = [scattered.pop() for _ in range(count)]
        keys = torch.randn(cached + new, heads.num_kv_heads, heads.head_dim, generator=generator)
        values = torch.randn(cached + new, heads.num_kv_heads, heads.head_dim, generator=generator)
        kept = []
        at = torch.arange(cached)
        in_pages, offsets = torch.tensor(pages)[at // page_size], at % page_size
        is_rotated = use_native and dtype == torch.int8
        written = rotated(keys) if is_rotated else keys
        pool.put(in_pages, offsets, written[:cached], values[:cached])
        for vectors in (written, values):
            elements, scales = pool.encode(vectors)
            kept.append(dequantize(elements, scales) if dtype == torch.int8 else elements.float())
        histories.append((rotated(kept[0]) / block_of(heads.head_dim) if is_rotated else kept[0], kept[1]))
        new_keys.append(keys[cached:])
        new_values.append(values[cached:])
        batch_rows.append(Row([0] * new, cached, pages))
        queries.append(torch.randn(new, heads.num_heads, heads.head_dim, generator=generator))

    attention = PagedAttention(Batch(batch_rows), kv)
    got = attention.append_and_attend(0, *map(torch.cat, (queries, new_keys, new_values)), scores)

    expected = torch.cat(
        [
            _plain_attention(query, keys, values, cached, scores)
            for query, (keys, values), (cached, _) in zip(queries, histories, rows, strict=True)
        ]
    )
    # Weights and queries are rounded to 8 bits, or to 7 without VNNI; in bfloat16 by their size.
    rounding = {torch.bfloat16: 0.02 if HAS_BFLOAT16 else 2e-6, torch.int8: 0.02 if HAS_VNNI else 0.05}
    tolerance = rounding.get(dtype, 2e-6) if use_native else 2e-6
    assert torch.allclose(got, expected, atol=tolerance), (got - expected).abs().max()


def _plain_attention(q: Tensor, keys: Tensor, values: Tensor, position: int, of: Scores) -> Tensor:
    """Attention of one row written out query by query."""
    out = torch.empty_like(q)
    group = q.shape[1] // keys.shape[1]
    for query in range(len(q)):
        newest = position + query
        oldest = 0 if of.window is None else max(0, newest - of.window + 1)
        for kv_head in range(keys.shape[1]):
            group_of = slice(kv_head * group, (kv_head + 1) * group)
            scores = q[query, group_of] @ keys[oldest : newest + 1, kv_head].T * of.scale
            if of.soft_cap is not None:
                scores = of.soft_cap * (scores / of.soft_cap).tanh()
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if of.sink_logits is not None:
                total = total + of.sink_logits[group_of, None].exp()
            out[query, group_of] = weights / total @ values[oldest : newest + 1, kv_head]
    return out
