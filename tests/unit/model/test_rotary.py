"""Tests of rotary: the model's own angles where those are exact, and exact ones where they are not."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from microturn.model.rotary import Form, Layout, Rotary, Turning

HEAD_DIM = 16


def config(**rope: object) -> LlamaConfig:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, **rope}
    return LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=parameters)


def rotary_of(module: torch.nn.Module, layout: Layout = Layout.HALVES) -> Rotary:
    rotary = Rotary.of(module, Form(layout.value))
    rotary.turnings = [Turning(None, layout)] * 2
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
    module, positions, x = LlamaRotaryEmbedding(config(**rope)), torch.arange(2048)[None], torch.zeros(1)
    for got, expected in zip(rotary_of(module)(x, positions), module(x, positions), strict=True):
        assert got.dtype == torch.float32
        assert (got - expected).abs().max() < 3e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_form_has_the_same_angles(dtype: torch.dtype) -> None:
    """gpt-oss scales both, DeepSeek-V2 the complex number of both, which is never rounded to the model's type."""
    module, positions = LlamaRotaryEmbedding(config(rope_type="yarn", factor=4.0)), torch.arange(9)[None]
    cos, sin = (part[..., : HEAD_DIM // 2] for part in module(torch.zeros(1), positions))
    once, whole = (
        Rotary.of(module, form)(torch.zeros(1, dtype=dtype), positions) for form in (Form.ONCE, Form.COMPLEX)
    )
    for got, expected in ((once[0], cos.to(dtype)), (once[1], sin.to(dtype)), (whole.real, cos), (whole.imag, sin)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_angles_of_pairs_are_the_same_however_heads_are_laid_out(rope_type: str, layout: Layout) -> None:
    """YaRN scales cosines and sines, which turning back must not do again."""
    module, positions = LlamaRotaryEmbedding(config(rope_type=rope_type, factor=4.0)), torch.tensor([0, 7, 1000])
    rotary, of_module = rotary_of(module), module(torch.zeros(1), positions[None])
    for got, expected in zip(rotary.angles(Turning(None, layout), positions), of_module, strict=True):
        assert got.shape == (3, HEAD_DIM // 2)
        assert (got - expected[0, :, : HEAD_DIM // 2]).abs().max() < 3e-4
    rotation = rotary.rotation_of(Turning(None, layout), positions)
    assert (layout.split(rotation.cos)[0].square() + layout.split(rotation.sin)[1].square() - 1).abs().max() < 1e-6


def test_without_positions_there_are_no_angles() -> None:
    rotary = rotary_of(LlamaRotaryEmbedding(config()))
    for part in rotary.angles(Turning(None, None), torch.tensor([0, 7, 1000])):
        assert part.shape == (3, 0)
    assert [rotary.num_turned(Turning(None, pairs)) for pairs in (*Layout, None)] == [HEAD_DIM, HEAD_DIM, 0]


@pytest.mark.parametrize("layout", Layout)
def test_what_is_split_is_joined_again(layout: Layout) -> None:
    x = torch.arange(12.0).view(2, 6)
    assert torch.equal(layout.join(*layout.split(x)), x)


def test_angles_may_be_interleaved() -> None:
    module, positions, x = CohereRotaryEmbedding(config()), torch.arange(2048)[None], torch.zeros(1)
    for got, expected in zip(rotary_of(module, Layout.INTERLEAVED)(x, positions), module(x, positions), strict=True):
        assert (got - expected).abs().max() < 3e-4


@pytest.mark.parametrize("position", [10**5, 10**7, 10**9])
def test_angles_are_exact_where_float32_is_not(position: int) -> None:
    """Two positions next to each other are one step apart, however far out they lie."""
    rotary = rotary_of(LlamaRotaryEmbedding(config()))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 1, HEAD_DIM, generator=generator)
    near = rotary.rotation(0, torch.tensor([1]))(x)
    far = rotary.rotation(0, torch.tensor([-position]))(rotary.rotation(0, torch.tensor([position + 1]))(x))
    assert (near - far).abs().max() < 1e-5


@pytest.mark.parametrize("layout", Layout)
def test_a_rotation_is_that_of_the_angles_and_leaves_the_rest_of_a_head_alone(layout: Layout) -> None:
    rotary = rotary_of(LlamaRotaryEmbedding(config()), layout)
    x = torch.randn(3, 2, HEAD_DIM + 4, generator=torch.Generator().manual_seed(2))
    turned = rotary.rotation(1, torch.tensor([0, 5, -7]))(x)
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[..., HEAD_DIM:], x[..., HEAD_DIM:])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.allclose(rotary.rotation(0, torch.tensor([0, -5, 7]))(turned), x, atol=1e-6)
    first, second = (0, HEAD_DIM // 2) if layout is Layout.HALVES else (0, 1)
    pair = (
        torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones(3), torch.tensor([0.0, 5, -7]))[:, None]
    )
    assert torch.allclose(turned[..., first], pair.real, atol=1e-6)
    assert torch.allclose(turned[..., second], pair.imag, atol=1e-6)


def test_a_layer_without_positions_turns_nothing() -> None:
    rotary = rotary_of(LlamaRotaryEmbedding(config()))
    rotary.turnings = [Turning(None, None)]
    x = torch.randn(2, 3, HEAD_DIM)
    assert torch.equal(rotary.rotation(0, torch.tensor([3, 1000]))(x), x)
