"""Tests of rotary_fit: ours takes the place of a model's own module where the layers do the same with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama import modeling_llama

from microturn.model.rotary import Form, Layout, Rotary, Turning, installed
from microturn.model.rotary_fit import install
from microturn.model.runner import load_model
from support import models
from support.families import write_family
from support.models import build

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(**rope: Any) -> PreTrainedModel:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    return build(LlamaForCausalLM, LlamaConfig(rope_parameters=parameters, **SHAPE))


def own_rotary(model: PreTrainedModel) -> nn.Module:
    return model.model.rotary_emb


def test_a_model_has_ours_once(tiny_model: PreTrainedModel) -> None:
    found = installed(tiny_model)
    assert found is not None
    again = copy.deepcopy(tiny_model)
    install(again)
    assert isinstance(installed(again), Rotary)
    assert not isinstance(installed(again).stock[0], Rotary)


def test_pairs_are_found_in_what_layers_do_and_angles_in_what_they_take(tmp_path: Path) -> None:
    """Cohere interleaves both, GLM interleaves the pairs of half a head and takes angles in halves.

    gpt-oss takes each angle once, DeepSeek-V2 as a complex number; there the rotated elements are the first of a head
    over latent vectors.
    """
    layers = ["sliding_attention", "full_attention"]
    found = {
        "llama": installed(llama()),
        "cohere": installed(build(CohereForCausalLM, CohereConfig(**SHAPE))),
        "cohere2": installed(build(Cohere2ForCausalLM, Cohere2Config(layer_types=layers, **SHAPE))),
        "glm": installed(build(GlmForCausalLM, GlmConfig(head_dim=16, **SHAPE))),
        **{name: installed(load_model(write_family(name, tmp_path / name))) for name in ("gpt_oss", "deepseek_v2")},
    }
    halves, interleaved = Layout.HALVES, Layout.INTERLEAVED
    assert {name: (rotary.form, [turning.pairs for turning in rotary.turnings]) for name, rotary in found.items()} == {
        "llama": (Form.HALVES, [halves, halves]),
        "cohere": (Form.INTERLEAVED, [interleaved, interleaved]),
        "cohere2": (Form.INTERLEAVED, [interleaved, None]),
        "glm": (Form.HALVES, [interleaved, interleaved]),
        "gpt_oss": (Form.ONCE, [halves, halves]),
        "deepseek_v2": (Form.COMPLEX, [interleaved, interleaved]),
    }


def test_scaling_that_does_not_change_within_the_context_is_ours() -> None:
    """`dynamic` scales behind the end of what the model was trained for, where no session without a window comes."""
    assert installed(llama(rope_type="dynamic", factor=2.0)) is not None


@pytest.mark.parametrize("build_model", [models.attention_beside_mamba2, models.short_convolutions])
def test_recurrent_layers_do_not_hide_how_the_others_rotate(build_model: Callable[[], PreTrainedModel]) -> None:
    assert installed(build_model()) is not None


def test_angles_that_depend_on_the_longest_position_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microturn.model.rotary_fit.num_positions_of", lambda _: 4096)
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = llama(rope_type="longrope", original_max_position_embeddings=128, **factors)
    assert installed(model) is None
    assert type(own_rotary(model)) is modeling_llama.LlamaRotaryEmbedding


def _sines_first(module: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = module.original(x, position_ids)
    return sin, cos


def test_angles_in_an_unknown_form_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rotary, turn = modeling_llama.LlamaRotaryEmbedding, modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(rotary, "original", rotary.forward, raising=False)
    monkeypatch.setattr(rotary, "forward", _sines_first)

    def apply(q: Tensor, k: Tensor, sin: Tensor, cos: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = turn(q, k, cos, sin)
        return turned

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)
    assert type(own_rotary(llama())) is rotary


def test_layers_that_turn_in_another_way_have_exact_angles_and_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        cos, sin = cos[:, None], sin[:, None]
        first, second = cos.shape[-1] // 2, cos.shape[-1]
        return tuple(
            torch.cat(
                (x[..., :first], x[..., first:] * cos[..., first:second] + x[..., :first] * sin[..., first:second]), -1
            )
            for x in (q, k)
        )

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)
    model = llama()
    assert type(own_rotary(model)) is Rotary
    assert installed(model) is None
    assert Turning() not in own_rotary(model).turnings
