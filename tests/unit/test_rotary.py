"""Tests of rotary: the model's own angles where those are exact, and exact ones where they are not."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from microturn.rotary import Rotary, install, installed

HEAD_DIM = 16


def llama_rotary(**rope: object) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    return LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=parameters)
    )


def rotary_of(module: torch.nn.Module) -> Rotary:
    rotary = Rotary.of(module, ["", ""])
    assert rotary is not None
    return rotary


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ],
    ids=lambda rope: rope.get("rope_type", "default"),
)
def test_angles_are_those_of_the_models_own_module(rope: dict[str, object]) -> None:
    module, positions, x = llama_rotary(**rope), torch.arange(2048)[None], torch.zeros(1)
    for got, expected in zip(rotary_of(module)(x, positions), module(x, positions), strict=True):
        assert got.dtype == torch.float32
        assert (got - expected).abs().max() < 3e-4


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}])
def test_angles_that_depend_on_the_longest_sequence_are_left_to_the_model(rope: dict[str, object]) -> None:
    assert Rotary.of(llama_rotary(**rope), ["", ""]) is None


@pytest.mark.parametrize("position", [10**5, 10**7, 10**9])
def test_angles_are_exact_where_float32_is_not(position: int) -> None:
    """Two positions next to each other are one step apart, however far out they lie."""
    rotary = rotary_of(llama_rotary())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 1, HEAD_DIM, generator=generator)
    near = rotary.rotation(0, torch.tensor([1]))(x)
    far = rotary.rotation(0, torch.tensor([-position]))(rotary.rotation(0, torch.tensor([position + 1]))(x))
    assert (near - far).abs().max() < 1e-5


def test_a_rotation_is_that_of_the_angles_and_leaves_the_rest_of_a_head_alone() -> None:
    rotary = rotary_of(llama_rotary())
    x = torch.randn(3, 2, HEAD_DIM + 4, generator=torch.Generator().manual_seed(2))
    turned = rotary.rotation(1, torch.tensor([0, 5, -7]))(x)
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[..., HEAD_DIM:], x[..., HEAD_DIM:])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.allclose(rotary.rotation(0, torch.tensor([0, -5, 7]))(turned), x, atol=1e-6)


def test_a_model_with_ours_installed_says_the_same(tiny_model: PreTrainedModel) -> None:
    assert installed(tiny_model) is not None
    again = copy.deepcopy(tiny_model)
    install(again)
    assert isinstance(installed(again), Rotary)
