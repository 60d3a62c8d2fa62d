"""Whether a model runs with 8-bit weights is found out by numbers, and refused with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv.page_layout import PageLayout
from microturn.model.cpu import attention as native
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.probe_int8 import Refused, int8_decoder
from microturn.model.tracing import trace_layers
from support import models
from support.oracle import stock_logits

SHAPES = ["grouped_heads", "sliding_window", "llama", "biases", "experts", "shared_expert", "experts_in_some_layers"]
SHAPES += ["neighbouring_pairs", "no_positions", "own_fusion", "pairs_in_half_heads", "factors"]
SHAPES += ["norms_behind", "positions_in_windows"]


def probe(model: PreTrainedModel, layout: PageLayout = PageLayout.PANELS) -> None:
    layers = trace_layers(model)
    int8_decoder(model, layers, FusedLayers.of(model, layers), layout)


@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_several_shapes_pass_and_stay_as_they_are(shape: str) -> None:
    model = getattr(models, shape)()
    before = stock_logits(model, range(50))
    probe(model)
    assert torch.equal(stock_logits(model, range(50)), before)


def test_heads_that_panels_do_not_take_are_attended_by_torch() -> None:
    model = models.heads_of_22()
    assert native.unavailable_reason(16, trace_layers(model)) == "heads of 22 elements, no multiple of 4"
    probe(model, PageLayout.HND)


def test_layers_that_are_not_ours_are_refused() -> None:
    model = models.layer_norms()
    with pytest.raises(Refused, match="StableLmForCausalLM runs on transformers' layers"):
        int8_decoder(model, trace_layers(model), None, PageLayout.PANELS)


def _one_scale_for_the_whole_batch(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


def _nothing_at_all(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_one_scale_for_the_whole_batch, "change beside another session"), (_nothing_at_all, "deviate from the stock")],
)
def test_what_computes_something_else_is_refused(
    change: Callable[[Tensor], Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Int8Linear.__call__
    monkeypatch.setattr(Int8Linear, "__call__", lambda self, x, out: original(self, change(x), out))
    model = models.llama()
    with pytest.raises(Refused, match=reason):
        probe(model)
