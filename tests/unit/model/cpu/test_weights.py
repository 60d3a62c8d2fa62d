"""Which modules are known, and what is read out of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from microturn.model.cpu.linear import Linear
from microturn.model.cpu.weights import DecoderLayer, RMSNorm, unknown_reason
from microturn.model.rotary import Rotary, Turning
from microturn.model.tracing import trace_layers
from support import models


@pytest.mark.parametrize("build", [*models.FAST, models.experts, models.shared_expert, models.experts_in_some_layers])
def test_the_family_is_known(build: Callable[[], PreTrainedModel]) -> None:
    model = build()
    assert unknown_reason(model, trace_layers(model)) is None


def _another_linear(model: PreTrainedModel) -> None:
    class Quantized(nn.Linear):
        pass

    model.model.layers[1].mlp.up_proj = Quantized(48, 80, bias=False)


def _another_norm(model: PreTrainedModel) -> None:
    model.model.layers[2].input_layernorm = nn.LayerNorm(48)


def _one_more_module(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.gate = nn.Linear(48, 48)


def _projections_that_do_not_fit(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.gate_proj = nn.Linear(48, 96, bias=False)


def _angles_for_more_than_a_head(model: PreTrainedModel) -> None:
    model.model.rotary_emb = Rotary({None: torch.ones(7)}, {None: 1.0}, [Turning()] * 3)


def _a_norm_of_two_heads(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_norm, attention.k_norm = nn.RMSNorm(24, eps=1e-5), nn.RMSNorm(12, eps=1e-5)


def _angles_of_nothing_known(model: PreTrainedModel) -> None:
    model.model.rotary_emb.turnings = []


def _heads_that_do_not_fit(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.q_proj = nn.Linear(48, 96, bias=False)


def _layers_of_several_sizes(model: PreTrainedModel) -> None:
    _heads_that_do_not_fit(model)
    model.model.layers[0].self_attn.o_proj = nn.Linear(96, 48, bias=False)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_another_linear, "its up_proj is a Quantized"),
        (_another_norm, "its input_layernorm is a LayerNorm"),
        (_one_more_module, "its attention has gate besides"),
        (_projections_that_do_not_fit, "its feed-forward block has projections that do not fit each other"),
        (_heads_that_do_not_fit, "its attention has projections that do not fit each other"),
        (_a_norm_of_two_heads, "the norms of its queries and keys are neither of one head nor of all"),
        (_angles_of_nothing_known, "how its layers rotate queries and keys is not known"),
        (_angles_for_more_than_a_head, "it has rotary angles for 14 of 12 elements of a head"),
        (_layers_of_several_sizes, "its layers differ in their sizes"),
    ],
)
def test_a_model_that_is_changed_anywhere_is_not_known(change: Callable[[PreTrainedModel], None], reason: str) -> None:
    model = models.llama()
    layers = trace_layers(model)
    change(model)
    assert unknown_reason(model, layers) == reason


def test_an_architecture_of_other_modules_is_not_known() -> None:
    model = models.layer_norms()
    assert unknown_reason(model, trace_layers(model)) == "its norm is a LayerNorm"


def test_what_is_missing_and_what_is_more_are_told_together() -> None:
    model = models.llama()
    layers = trace_layers(model)
    block = model.model.layers[0].mlp
    block.router = nn.ModuleList()
    del block.up_proj, block.down_proj
    assert unknown_reason(model, layers) == "its feed-forward block lacks down_proj, up_proj and has router besides"


def test_a_model_of_which_some_layers_are_no_attention_is_not_known() -> None:
    model = models.llama()
    assert unknown_reason(model, trace_layers(model)[1:]) == "2 of its 3 layers are attention"


@torch.inference_mode()
@pytest.mark.parametrize("build", [models.llama, models.sliding_window], ids=["gain", "gain less one"])
def test_a_norm_is_read_as_its_module_applies_it(build: Callable[[], PreTrainedModel]) -> None:
    module = build().model.norm
    x = torch.randn(3, 48)
    torch.testing.assert_close(RMSNorm.of(module)(x, torch.empty_like(x)), module(x))


def test_norms_have_their_places() -> None:
    """Llama's post_attention_layernorm comes before the gated block, Gemma's behind the attention."""
    for model, name_of_place, has_norms_before, has_norms_behind in (
        (models.llama(), "feed_forward_norm", True, False),
        (models.sliding_window(), "attended_norm", True, True),
        (models.pairs_in_half_heads(), "feed_forward_norm", True, True),
        (models.norms_behind(), "attended_norm", False, True),
    ):
        module = model.model.layers[0]
        layer = DecoderLayer.of(module, trace_layers(model)[0], Turning(), Linear)
        assert (getattr(layer, name_of_place).gain == RMSNorm.of(module.post_attention_layernorm).gain).all()
        assert (layer.attended_norm is not None) == (layer.fed_forward_norm is not None) == has_norms_behind
        assert (layer.input_norm is not None) == (layer.feed_forward_norm is not None) == has_norms_before
