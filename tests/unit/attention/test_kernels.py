"""Both kernels against attention written out in plain torch, over every kind of row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from microturn.attention import native
from microturn.attention.paged import DENSE_QUERIES, PagedAttention
from microturn.batch import Batch, Row
from microturn.kv_tensors import KVTensors, LayerShape

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 6, 2, 24, 4
SCALE = HEAD_DIM**-0.5


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("window", [None, 1, 7, 300])
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 1)], id="the first token"),
        pytest.param([(0, 5), (9, 1), (4, 4), (300, 3)], id="mixed rows"),
        pytest.param([(native.SPLIT_LEN - 1, 1), (native.SPLIT_LEN, 1), (2 * native.SPLIT_LEN, 2)], id="split borders"),
        pytest.param([(30, DENSE_QUERIES - 1), (30, DENSE_QUERIES), (3, 1)], id="long and short appends"),
        pytest.param([(0, 3 * native.QUERY_TILE + 1)], id="several query tiles"),
    ],
)
def test_paged_attention_equals_attention_over_plain_keys(
    rows: list[tuple[int, int]], window: int | None, use_native: bool
) -> None:
    """Each row is (tokens in the cache, new tokens); its pages are scattered over the pool."""
    generator = torch.Generator().manual_seed(1)
    num_pages = [-(-(cached + new) // PAGE_SIZE) for cached, new in rows]
    scattered = torch.randperm(sum(num_pages) + 3, generator=generator).tolist()
    kv = KVTensors([LayerShape(KV_HEADS, HEAD_DIM, window)], len(scattered), PAGE_SIZE)
    kv.layers[0].fill_(float("nan"))  # whoever reads what nobody wrote is found out
    histories: list[tuple[Tensor, Tensor]] = []
    batch_rows, queries = [], []
    for (cached, new), count in zip(rows, num_pages, strict=True):
        pages = [scattered.pop() for _ in range(count)]
        keys = torch.randn(cached + new, KV_HEADS, HEAD_DIM, generator=generator)
        values = torch.randn(cached + new, KV_HEADS, HEAD_DIM, generator=generator)
        for position in range(cached):
            kv.layers[0][pages[position // PAGE_SIZE], 0, position % PAGE_SIZE] = keys[position]
            kv.layers[0][pages[position // PAGE_SIZE], 1, position % PAGE_SIZE] = values[position]
        histories.append((keys, values))
        batch_rows.append(Row([0] * new, cached, pages))
        queries.append(torch.randn(new, HEADS, HEAD_DIM, generator=generator))
    new_keys = torch.cat([keys[cached:] for (cached, _), (keys, _) in zip(rows, histories, strict=True)])
    new_values = torch.cat([values[cached:] for (cached, _), (_, values) in zip(rows, histories, strict=True)])

    attention = PagedAttention(Batch(batch_rows), kv, native=use_native)
    got = attention.append_and_attend(0, torch.cat(queries), new_keys, new_values, SCALE, window)

    expected = torch.cat(
        [
            _plain_attention(query, keys, values, cached, window)
            for query, (keys, values), (cached, _) in zip(queries, histories, rows, strict=True)
        ]
    )
    assert torch.allclose(got, expected, atol=2e-6), (got - expected).abs().max()


@pytest.mark.parametrize("company", [1, 5])
def test_a_row_is_the_same_to_the_bit_in_any_company(company: int) -> None:
    """Tiles and splits depend on the row alone."""
    generator = torch.Generator().manual_seed(2)
    kv = KVTensors([LayerShape(KV_HEADS, HEAD_DIM)], 400, PAGE_SIZE)
    kv.layers[0].normal_(generator=generator)
    row = Row([0] * 3, 700, list(range(200)))
    others = [Row([0] * (n + 1), 50 * n, list(range(200, 300))) for n in range(company)]
    q = torch.randn(3 + sum(n + 1 for n in range(company)), HEADS, HEAD_DIM, generator=generator)
    k = torch.randn(len(q), KV_HEADS, HEAD_DIM, generator=generator)
    alone = PagedAttention(Batch([row]), kv, native=True).append_and_attend(0, q[:3], k[:3], k[:3], SCALE, None)
    beside = PagedAttention(Batch([row, *others]), kv, native=True).append_and_attend(0, q, k, k, SCALE, None)
    assert torch.equal(alone, beside[:3])


def _plain_attention(q: Tensor, keys: Tensor, values: Tensor, position: int, window: int | None) -> Tensor:
    """Attention of one row written out query by query."""
    out = torch.empty_like(q)
    for query in range(len(q)):
        newest = position + query
        oldest = 0 if window is None else max(0, newest - window + 1)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = keys[oldest : newest + 1, kv_head] @ q[query, head] * SCALE
            out[query, head] = scores.softmax(0) @ values[oldest : newest + 1, kv_head]
    return out
