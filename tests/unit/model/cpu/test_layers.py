"""Fused layers give the stock model's logits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from microturn.kv.page_layout import PageLayout
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch, Row
from microturn.model.cpu import attention as native
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.weights import NotKnown
from microturn.model.runner import ModelRunner
from microturn.model.tracing import trace_layers
from support import models
from support.oracle import stock_logits

SHAPES = [
    "llama",
    "grouped_heads",
    "sliding_window",
    "soft_caps",
    "biases",
    "experts",
    "shared_expert",
    "experts_in_some_layers",
    "neighbouring_pairs",
    "no_positions",
    "own_fusion",
    "pairs_in_half_heads",
    "factors",
    "norms_behind",
    "positions_in_windows",
]


def fused_runner(model: PreTrainedModel) -> ModelRunner:
    layers = trace_layers(model)
    decoder = FusedLayers.of(model, layers)
    return ModelRunner(model, KVTensors(layers, 32, 16, layout=PageLayout.PANELS), decoder=decoder)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_stock_model_s_for_few_rows_and_for_many(shape: str) -> None:
    model = getattr(models, shape)()
    ids = torch.randint(models.VOCAB_SIZE, (84,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = stock_logits(model, ids)
    runner = fused_runner(model)
    pages = list(range(8))
    cuts = [0, 1, 5, 44, len(ids)]
    for first, last in pairwise(cuts):
        got = runner.run(Batch([Row(ids[first:last], first, pages)]))
        torch.testing.assert_close(got[0], expected[last - 1], atol=1e-4, rtol=1e-4)
    assert torch.equal(stock_logits(model, ids), expected), "the stock model computes as before"


def test_only_rows_that_want_logits_have_them() -> None:
    runner = fused_runner(models.llama())
    rows = [Row([5, 6], 0, [0]), Row([7], 0, [1], wants_logits=False), Row([8], 0, [2])]
    got = runner.run(Batch(rows))
    assert got.shape == (2, models.VOCAB_SIZE)
    torch.testing.assert_close(got[1], runner.run(Batch([rows[2]]))[0])
    assert runner.run(Batch([rows[1]])).shape == (0, models.VOCAB_SIZE)


def test_weights_are_not_in_memory_twice() -> None:
    model = models.llama()
    decoder = FusedLayers.of(model, trace_layers(model))
    fused = decoder._known[1]
    attention, feed_forward = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for linear, modules in (
        (fused.qkv, (attention.q_proj, attention.k_proj, attention.v_proj)),
        (fused.output, (attention.o_proj,)),
        (fused.feed_forward.blocks[0].gate_up, (feed_forward.gate_proj, feed_forward.up_proj)),
        (fused.feed_forward.blocks[0].down, (feed_forward.down_proj,)),
    ):
        assert [weight.ctypes.data for weight in linear.weights] == [module.weight.data_ptr() for module in modules]


def test_an_unknown_architecture_and_a_machine_without_numba_s_threads_have_no_fused_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.layer_norms()
    with pytest.raises(NotKnown, match="its norm is a LayerNorm"):
        FusedLayers.of(model, trace_layers(model))
    model = models.llama()
    monkeypatch.setattr(native, "unavailable_reason", lambda: "no OpenMP")
    with pytest.raises(NotKnown, match="no OpenMP"):
        FusedLayers.of(model, trace_layers(model))
