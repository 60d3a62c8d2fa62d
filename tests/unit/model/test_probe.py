"""Which models can be served is found out by numbers, and a model that cannot is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    PreTrainedModel,
    StableLmForCausalLM,
)

from microturn.errors import InvalidArgument
from microturn.kv.page_layout import PageLayout
from microturn.model import latent_attention
from microturn.model import paged_attention as paged
from microturn.model.probe import check_model
from microturn.model.runner import load_model
from microturn.model.tracing import trace, trace_layers
from support import models
from support.models import build
from support.tiny_model_dir import write_tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Scaled(LlamaForCausalLM):
    """Has Llama's modules, and scales the logits in its forward method."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        result.logits = result.logits * 0.5
        return result


@pytest.mark.parametrize("layout", PageLayout)
def test_models_of_several_shapes_pass(tiny_model: PreTrainedModel, layout: PageLayout) -> None:
    checked = check_model(tiny_model, trace_layers(tiny_model), layout)
    assert checked.accepts_embeds
    assert (checked.decoder is None) == isinstance(tiny_model, StableLmForCausalLM)
    assert (checked.no_fused_reason is None) == (checked.decoder is not None)


def test_a_factor_that_the_modules_do_not_show_leaves_the_layers_to_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build(Scaled, LlamaConfig(num_key_value_heads=2, **SHAPE))
    with caplog.at_level("WARNING"):
        checked = check_model(model, trace_layers(model), PageLayout.PANELS)
    assert checked.decoder is None
    assert checked.accepts_embeds
    assert "Scaled runs on transformers' layers, which are slower than fused ones: logits" in caplog.text
    assert checked.no_fused_reason is not None
    assert checked.no_fused_reason.startswith("logits in several turns deviate from the stock model's by")


def test_layers_are_found_by_what_they_ask_for() -> None:
    layers = trace_layers(models.sliding_window())
    assert [(layer.num_kv_heads, layer.head_dim, layer.window) for layer in layers] == [
        (1, 16, 20),
        (1, 16, None),
        (1, 16, 20),
    ]


def test_an_attention_with_an_argument_that_we_lack_is_refused_by_its_name() -> None:
    model = models.llama()
    model.forward = partial(model.forward, position_bias=torch.zeros(1))
    with pytest.raises(InvalidArgument, match="LlamaForCausalLM cannot be served: it uses attention with 'position_b"):
        trace_layers(model)


def test_soft_caps_are_among_what_our_layers_have() -> None:
    model = models.soft_caps()
    assert [scores.soft_cap for scores in trace(model)[1]] == [2.0] * 3
    checked = check_model(model, trace_layers(model), PageLayout.PANELS)
    assert checked.decoder is not None
    assert checked.no_window_reason is None


@pytest.mark.parametrize("layout", PageLayout)
@pytest.mark.parametrize("value_dim", [16, 24, 32])
def test_values_may_be_smaller_or_larger_than_keys(
    value_dim: int, layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent_attention, "install", lambda _: None)  # keys and values of all heads
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    config = MiniCPM3Config(num_key_value_heads=4, v_head_dim=value_dim, **sizes, **SHAPE)
    model = build(MiniCPM3ForCausalLM, config)
    layers = trace_layers(model)
    assert [layer.head_dim for layer in layers] == [max(24, value_dim)] * 2
    check_model(model, layers, layout)


def test_a_model_that_never_calls_the_attention_interface_is_refused() -> None:
    model = build(BloomForCausalLM, BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4))
    with pytest.raises(InvalidArgument, match="0 of its 2 layers call"):
        trace_layers(model)


def test_rotary_scaling_by_the_longest_position_in_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`longrope` turns everybody's angles when one session grows long: company would change the tokens.

    So contexts end before that length (see `positions`). Here they are said not to.
    """
    for module in ("probe", "rotary_fit"):
        monkeypatch.setattr(f"microturn.model.{module}.num_positions_of", lambda _: 512)
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128, **factors}
    config = LlamaConfig(max_position_embeddings=512, num_key_value_heads=2, rope_parameters=rope, **SHAPE)
    model = build(LlamaForCausalLM, config)
    with pytest.raises(InvalidArgument, match="beside a session at the end of its context"):
        check_model(model, trace_layers(model), PageLayout.PANELS)


def test_a_model_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    layers = trace_layers(model)
    original = paged.PagedAttention.append_and_attend
    monkeypatch.setattr(
        paged.PagedAttention,
        "append_and_attend",
        lambda self, *args: original(self, *args[:4], replace(args[4], scale=args[4].scale * 1.1)),
    )
    with pytest.raises(InvalidArgument, match="logits in several turns deviate"):
        check_model(model, layers, PageLayout.PANELS)


def test_a_directory_without_a_model_is_one_clear_line(tmp_path: object) -> None:
    with pytest.raises(InvalidArgument, match="cannot load a causal language model"):
        load_model(str(tmp_path))


def test_a_directory_that_lacks_weights_is_refused_with_their_names(tmp_path: Path) -> None:
    """transformers makes them up: the model was checked against itself, and served."""
    directory = write_tiny_model(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidArgument, match=r"lacks 1 of its weights: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load_model(directory)
