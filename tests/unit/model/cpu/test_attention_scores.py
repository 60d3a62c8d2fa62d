"""Soft caps and sink logits: both kernels against plain torch, and the definition against transformers' own."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granite_swa import modeling_granite_swa

from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row
from microturn.model.cpu.attention_panels import KEY_BLOCK
from microturn.model.cpu.attention_work import SPLIT_LEN, TILE_ROWS
from microturn.model.dense_attention import weigh
from microturn.model.paged_attention import PagedAttention
from microturn.model.rotary import Rotary, Turning
from microturn.model.scores import Scores
from support.plain_attention import Heads, check_rows

HEADS = Heads(6, 2, 24)
# Below most scores, and in the order of a row's total weight; some heads' sinks get all or nothing.
CAP = 0.7
SINK_LOGITS = torch.tensor([1.0, -2.0, 5.0, 40.0, -80.0, 0.0])
# Each kind for some types of pages: compiling takes most of the time.
KINDS = [
    pytest.param(torch.float32, CAP, None, id="float32 capped"),
    pytest.param(torch.float32, None, SINK_LOGITS, id="float32 with sink logits"),
    pytest.param(torch.bfloat16, CAP, SINK_LOGITS, id="bfloat16 with both"),
    pytest.param(torch.int8, CAP, SINK_LOGITS, id="int8 with both"),
]


@pytest.mark.parametrize("use_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize(("dtype", "soft_cap", "sink_logits"), KINDS)
def test_both_kernels_give_plain_attention(
    dtype: torch.dtype, soft_cap: float | None, sink_logits: Tensor | None, window: int | None, use_native: bool
) -> None:
    rows = [(0, 1), (0, 5), (77, 1), (KEY_BLOCK - 1, 1), (2 * SPLIT_LEN - 1, 2), (130, TILE_ROWS + 5), (700, 1)]
    scores = {"soft_cap": soft_cap, "sink_logits": sink_logits}
    check_rows(HEADS, 16, rows, window, use_native=use_native, dtype=dtype, **scores)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("dtype", "soft_cap", "sink_logits"), KINDS)
def test_cutting_a_session_into_rows_changes_no_bit(
    dtype: torch.dtype, soft_cap: float | None, sink_logits: Tensor | None, window: int | None
) -> None:
    """Whole tiles, divided ones, single queries: the sink logit is added once, behind the last split."""
    generator = torch.Generator().manual_seed(4)
    num_tokens = 2 * SPLIT_LEN + 90
    q = torch.randn(num_tokens, HEADS.num_heads, HEADS.head_dim, generator=generator)
    k, v = torch.randn(2, num_tokens, HEADS.num_kv_heads, HEADS.head_dim, generator=generator)
    scores = Scores(HEADS.head_dim**-0.5, window, soft_cap, sink_logits)

    def attend(cuts: list[int]) -> Tensor:
        kv = KVTensors(
            [LayerShape(HEADS.num_kv_heads, HEADS.head_dim, window)], 50, 16, dtype, layout=PageLayout.PANELS
        )
        out = []
        for first, last in pairwise([0, *cuts, num_tokens]):
            row = Row([0] * (last - first), first, list(range(-(-last // 16))))
            parts = (part[first:last].contiguous() for part in (q, k, v))
            out.append(PagedAttention(Batch([row]), kv).append_and_attend(0, *parts, scores).clone())
        return torch.cat(out)

    whole = attend([])
    for cuts in (range(100, num_tokens, 100), range(3, num_tokens, 17), range(1, num_tokens)):
        assert torch.equal(whole, attend(list(cuts)))


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(("dtype", "soft_cap", "sink_logits"), KINDS)
def test_sinks_that_have_moved_share_a_softmax_with_the_other_keys(
    dtype: torch.dtype, soft_cap: float | None, sink_logits: Tensor | None, window: int | None
) -> None:
    """So a sink logit counts once, however many tasks a row has; rows with 24 keys and with several splits."""
    rotary = Rotary({None: 0.1 ** torch.arange(HEADS.head_dim // 2).float()}, {None: 1.0}, [Turning()])
    scores = Scores(HEADS.head_dim**-0.5, window, soft_cap, sink_logits)
    rows = [
        Row([0] * 5, 16 + 1008 + 3, [0, 1], num_sinks=16, num_evicted=1008),
        Row([0] * 3, 32 + 640 + 700, list(range(2, 48)), num_sinks=32, num_evicted=640),
        Row([0], 9, [60]),
    ]
    generator = torch.Generator().manual_seed(6)
    known = torch.randn(2, 64 * 16, HEADS.num_kv_heads, HEADS.head_dim, generator=generator)
    q = torch.randn(9, HEADS.num_heads, HEADS.head_dim, generator=generator)
    k, v = torch.randn(2, 9, HEADS.num_kv_heads, HEADS.head_dim, generator=generator)
    results = []
    for layout, of in ((PageLayout.PANELS, dtype), (PageLayout.HND, torch.float32)):
        kv = KVTensors([LayerShape(HEADS.num_kv_heads, HEADS.head_dim, window)], 64, 16, of, layout=layout)
        at = torch.arange(64 * 16)
        # In panels of int8 keys are written through the kernel, which rotates them.
        every = PagedAttention(Batch([Row([0] * len(at), 0, list(range(64)))]), kv, rotary=rotary)
        every.append_and_attend(0, torch.zeros(len(at), *q.shape[1:]), *known, Scores(1.0, window))
        results.append(PagedAttention(Batch(rows), kv, rotary=rotary).append_and_attend(0, q, k, v, scores))
    tolerance = 2e-6 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(*results, atol=tolerance, rtol=0)


def test_sink_logits_far_from_all_scores_get_all_or_nothing() -> None:
    kv = KVTensors([LayerShape(2, 16)], 1, 16, layout=PageLayout.PANELS)
    k, v, q = torch.randn(2, 2, 16), torch.randn(2, 2, 16), torch.randn(2, 4, 16)
    far = torch.tensor([1e4, -1e4, float("-inf"), 1e30])
    plain, got = (
        PagedAttention(Batch([Row([0, 0], 0, [0])]), kv).append_and_attend(0, q, k, v, Scores(0.25, sink_logits=of))
        for of in (None, far)
    )
    assert torch.equal(got[:, 1:3], plain[:, 1:3])
    assert not got[:, [0, 3]].any()


def test_scores_far_beyond_the_cap_are_the_cap() -> None:
    kv = KVTensors([LayerShape(1, 16)], 2, 16, layout=PageLayout.PANELS)
    keys = torch.full((32, 1, 16), -1e30)
    keys[::4], keys[1::4] = 1e4, 0.0
    values = torch.arange(32.0)[:, None, None].expand(32, 1, 16).contiguous()
    attention = PagedAttention(Batch([Row([0] * 32, 0, [0, 1])]), kv)
    got = attention.append_and_attend(0, torch.ones(32, 1, 16), keys, values, Scores(1.0, soft_cap=2.0))[-1, 0]
    weights = torch.tensor([2.0, 0.0, -2.0, -2.0]).exp().repeat(8)
    torch.testing.assert_close(got, (weights @ values[:, 0]) / weights.sum())


@pytest.mark.parametrize(
    ("family", "soft_cap", "sink_logits"),
    [
        (modeling_gemma2, CAP, None),
        (modeling_gpt_oss, None, SINK_LOGITS),
        (modeling_granite_swa, None, SINK_LOGITS),
    ],
    ids=["gemma2", "gpt_oss", "granite_swa"],
)
def test_the_definition_is_that_of_the_families(
    family: ModuleType, soft_cap: float | None, sink_logits: Tensor | None
) -> None:
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(HEADS.num_heads, 9, HEADS.head_dim, generator=generator)
    keys, values = torch.randn(2, HEADS.num_kv_heads, 30, HEADS.head_dim, generator=generator)
    visible = torch.arange(30) <= torch.arange(21, 30)[:, None]
    module = SimpleNamespace(num_key_value_groups=3, training=False, sinks=sink_logits)
    hidden = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
    arguments = {} if soft_cap is None else {"softcap": soft_cap}
    expected, _ = family.eager_attention_forward(
        module, q[None], keys[None], values[None], hidden, scaling=0.3, **arguments
    )
    got = weigh(q, keys, values, visible, Scores(0.3, None, soft_cap, sink_logits))
    torch.testing.assert_close(got.transpose(0, 1)[None], expected, atol=2e-6, rtol=1e-5)
