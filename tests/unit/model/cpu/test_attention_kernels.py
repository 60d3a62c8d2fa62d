"""Both kernels against attention written out in plain torch, over every kind of row; with plain scores."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row
from microturn.model.cpu.attention_panels import KEY_BLOCK
from microturn.model.cpu.attention_work import SPLIT_LEN, TILE_ROWS
from microturn.model.paged_attention import PagedAttention
from microturn.model.scores import Scores
from support.plain_attention import Heads, check_rows
from support.rounded import rotated

SMALL = Heads(6, 2, 24)
MANY_QUERIES = TILE_ROWS + 5


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("window", [None, 1, 7, 20, 300])
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 1)], id="the first token"),
        pytest.param([(0, 5), (9, 1), (4, 4), (300, 3)], id="mixed rows"),
        pytest.param([(n * SPLIT_LEN + i, 1) for n in (1, 2) for i in (-2, -1, 0, 1)], id="split borders"),
        pytest.param([(KEY_BLOCK + i, 2) for i in (-3, -2, -1, 0)], id="block borders"),
        pytest.param([(30, 31), (30, 32), (3, 1)], id="long and short appends"),
        pytest.param([(0, TILE_ROWS + 1)], id="several query tiles"),
        pytest.param([(2 * SPLIT_LEN, TILE_ROWS * 7)], id="tiles and splits"),
    ],
)
def test_paged_attention_equals_attention_over_plain_keys(
    rows: list[tuple[int, int]], window: int | None, use_native: bool
) -> None:
    check_rows(SMALL, 16, rows, window, use_native=use_native)


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(Heads(9, 3, 64), id="whole vectors"),
        pytest.param(Heads(2, 1, 80), id="an odd number of vectors"),
        pytest.param(Heads(4, 2, 20), id="no whole vector"),
        pytest.param(Heads(2, 2, 4), id="less than a vector"),
    ],
)
def test_pages_of_other_types_give_attention_over_what_they_keep(
    heads: Heads, window: int | None, dtype: torch.dtype, page_size: int, use_native: bool
) -> None:
    rows = [(0, 1), (0, 5), (77, 1), (KEY_BLOCK - 1, 1), (KEY_BLOCK, 1), (2 * SPLIT_LEN - 1, 2), (130, MANY_QUERIES)]
    check_rows(heads, page_size, rows, window, use_native=use_native, dtype=dtype)


@pytest.mark.parametrize(("use_native", "page_size"), [(True, 16), (True, 48), (False, 1), (False, 16)])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param(Heads(9, 3, 64), id="groups of 3"),
        pytest.param(Heads(4, 4, 64), id="groups of 1"),
        pytest.param(Heads(8, 2, 32), id="groups of 4"),
        pytest.param(Heads(16, 2, 64), id="groups of 8"),
        pytest.param(Heads(TILE_ROWS + 3, 1, 16), id="a group larger than a tile"),
        pytest.param(Heads(4, 1, 256), id="large heads"),
        pytest.param(Heads(2, 1, 80), id="heads of an odd number of vectors"),
        pytest.param(Heads(4, 2, 20), id="heads of no whole vector"),
        pytest.param(Heads(2, 2, 4), id="tiny heads"),
    ],
)
def test_all_shapes_of_heads_and_pages(heads: Heads, window: int | None, page_size: int, use_native: bool) -> None:
    check_rows(
        heads, page_size, [(0, 1), (77, 1), (300, 2), (50, 17), (130, MANY_QUERIES)], window, use_native=use_native
    )


@pytest.mark.parametrize("heads", [SMALL, Heads(9, 3, 64), Heads(16, 2, 64)], ids=str)
@pytest.mark.parametrize("new", [1, 3, 16, MANY_QUERIES])
@pytest.mark.parametrize("company", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_row_is_the_same_to_the_bit_in_any_company(heads: Heads, new: int, company: int, dtype: torch.dtype) -> None:
    """Tiles and splits depend on the row alone."""
    generator = torch.Generator().manual_seed(2)
    kv = KVTensors([LayerShape(heads.num_kv_heads, heads.head_dim)], 100, 16, dtype, layout=PageLayout.PANELS)
    known = torch.randn(2, 100 * 16, heads.num_kv_heads, heads.head_dim, generator=generator)
    at = torch.arange(100 * 16)
    kv.layers[0].put(at // 16, at % 16, *known)
    row = Row([0] * new, 700, list(range(50)))
    others = [Row([0] * (n + 1), 50 * n, list(range(50, 75))) for n in range(company)]
    num_others = sum(len(other.token_ids) for other in others)
    q = torch.randn(num_others + new, heads.num_heads, heads.head_dim, generator=generator)
    k = torch.randn(num_others + new, heads.num_kv_heads, heads.head_dim, generator=generator)

    def attend(rows: list[Row], first: int) -> Tensor:
        attention = PagedAttention(Batch(rows), kv)
        return attention.append_and_attend(0, q[first:], k[first:], k[first:], Scores(heads.head_dim**-0.5))

    alone = attend([row], num_others)
    assert torch.equal(alone, attend([*others, row], 0)[num_others:])


@pytest.mark.parametrize("heads", [SMALL, Heads(9, 3, 64), Heads(16, 2, 64), Heads(4, 4, 64)], ids=str)
@pytest.mark.parametrize("window", [None, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_cutting_a_session_into_rows_changes_no_bit(heads: Heads, window: int | None, dtype: torch.dtype) -> None:
    """Block borders, split borders, tiles of every width, single queries: nothing but what a query sees counts."""
    generator = torch.Generator().manual_seed(4)
    num_tokens = 2 * SPLIT_LEN + 90
    q = torch.randn(num_tokens, heads.num_heads, heads.head_dim, generator=generator)
    k, v = torch.randn(2, num_tokens, heads.num_kv_heads, heads.head_dim, generator=generator)

    def attend(cuts: list[int]) -> Tensor:
        shape = LayerShape(heads.num_kv_heads, heads.head_dim, window)
        kv = KVTensors([shape], 50, 16, dtype, layout=PageLayout.PANELS)
        out = []
        for first, last in pairwise([0, *cuts, num_tokens]):
            row = Row([0] * (last - first), first, list(range(-(-last // 16))))
            attention = PagedAttention(Batch([row]), kv)
            parts = (part[first:last].contiguous() for part in (q, k, v))
            out.append(attention.append_and_attend(0, *parts, Scores(heads.head_dim**-0.5, window)))
        return torch.cat(out)

    whole = attend([])
    for cuts in (range(100, num_tokens, 100), range(3, num_tokens, 17), range(1, num_tokens)):
        assert torch.equal(whole, attend(list(cuts)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_both_kernels_write_the_same_bits(dtype: torch.dtype, head_dim: int) -> None:
    """Numbers of every size, halves that are rounded to even, zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(3)
    k = torch.randn(40, 2, head_dim, generator=generator) * torch.logspace(-40, 37, 40)[:, None, None]
    v = torch.randint(-254, 255, k.shape, generator=generator) / 2
    v[:, :, 0] = 127  # a scale of 1
    k[3], k[4, 1, 5], k[5, 0, 2], v[6, 1, 7] = 0.0, float("nan"), float("inf"), -float("inf")
    k[7], k[8] = torch.finfo(torch.float32).tiny / 4, torch.finfo(torch.float32).max
    written = []
    for layout in PageLayout:
        kv = KVTensors([LayerShape(2, head_dim)], 3, 16, dtype, layout=layout)
        attention = PagedAttention(Batch([Row([0] * 40, 0, list(range(3)))]), kv)
        # In panels keys are rotated before they are rounded to int8.
        given = rotated(k) if dtype == torch.int8 and layout is PageLayout.HND else k
        attention.append_and_attend(0, torch.zeros(40, 4, head_dim), given, v, Scores(1.0))
        pool = kv.layers[0]
        keys, values = layout.keys(pool.elements, 16).flatten(3), layout.values(pool.elements, 16).flatten(2, 3)
        by_token = [part.transpose(1, 2).flatten(0, 1)[:40] for part in (keys, values, *pool.scales.unbind(1))]
        written.append(by_token)
    for panels, hnd in zip(*written, strict=True):
        torch.testing.assert_close(panels, hnd, rtol=0, atol=0, equal_nan=True)
    back = kv.layers[0].decode(torch.arange(3))[:, 0].transpose(1, 2).flatten(0, 1)[:40]
    assert back[4, 1, 5].isnan()
    assert not back[5, 0, 2].isfinite()


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    """Weights are relative to the peak: a key a thousand below it counts for nothing, and its row stays finite."""
    kv = KVTensors([LayerShape(1, 16)], 20, 16, layout=PageLayout.PANELS)
    keys = torch.full((300, 1, 16), -1000.0)
    keys[::100] = 1000.0
    values = torch.arange(300.0)[:, None, None].expand(300, 1, 16).contiguous()
    attention = PagedAttention(Batch([Row([0] * 300, 0, list(range(20)))]), kv)
    got = attention.append_and_attend(0, torch.ones(300, 1, 16), keys, values, Scores(1.0))
    expected = torch.tensor([0.0, 50.0, 100.0]).repeat_interleave(100)
    assert torch.allclose(got[:, 0], expected[:, None], atol=1e-4)
