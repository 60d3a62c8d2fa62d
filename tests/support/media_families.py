"""Tiny random multimodal models of more families, with inputs as their processors would make them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    InternVLConfig,
    InternVLForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
)

_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48}
_TEXT = {
    **_LAYERS,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION = {**_LAYERS, "image_size": 32, "patch_size": 8}
_PLACEHOLDER = 90

ModelAndInputs = tuple[PreTrainedModel, dict[str, Tensor]]


def voxtral() -> ModelAndInputs:
    """Two seconds of sound, four states of the encoder in one token."""
    encoder = {**_LAYERS, "intermediate_size": 128, "num_mel_bins": 16, "max_source_positions": 100}
    text = {"model_type": "llama", **_TEXT}
    config = VoxtralConfig(text_config=text, audio_config=encoder, audio_token_id=_PLACEHOLDER)
    sound = {"input_features": torch.randn(1, 16, 200)}
    return VoxtralForConditionalGeneration(config), {"input_ids": _around(25), **sound}


def smolvlm() -> ModelAndInputs:
    """Two tiles."""
    text = {"model_type": "llama", **_TEXT}
    config = SmolVLMConfig(
        text_config=text, vision_config=_VISION, image_token_id=_PLACEHOLDER, scale_factor=2, pad_token_id=None
    )
    tiles = {"pixel_values": torch.randn(1, 2, 3, 32, 32)}
    return SmolVLMForConditionalGeneration(config), {"input_ids": _around(4, 4), **tiles}


def internvl() -> ModelAndInputs:
    """An image, before a Qwen 2."""
    vision = {**_LAYERS, "image_size": [32, 32], "patch_size": [8, 8]}
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **_TEXT}, vision_config=vision, image_token_id=_PLACEHOLDER
    )
    return InternVLForConditionalGeneration(config), {
        "input_ids": _around(4),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }


def mistral3() -> ModelAndInputs:
    """Two images, of a size that is told beside them."""
    text = {"model_type": "mistral", **_TEXT}
    vision = {"model_type": "pixtral", **_VISION, "head_dim": 16}
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=_PLACEHOLDER, spatial_merge_size=2
    )
    images = {"pixel_values": torch.randn(2, 3, 32, 32), "image_sizes": torch.tensor([[32, 32], [32, 32]])}
    return Mistral3ForConditionalGeneration(config), {"input_ids": _around(4, 4), **images}


FAMILIES: dict[str, Callable[[], ModelAndInputs]] = {of.__name__: of for of in (voxtral, smolvlm, internvl, mistral3)}


def random_family(name: str) -> ModelAndInputs:
    """A model whose weights are wide, and its inputs."""
    torch.manual_seed(2)
    model, inputs = FAMILIES[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    return model.eval(), inputs


def _around(*nums_placeholders: int) -> Tensor:
    """Text, and media of so many tokens behind it, each with text behind."""
    ids = [1, 2]
    for number, num_placeholders in enumerate(nums_placeholders):
        ids += [_PLACEHOLDER] * num_placeholders + [3 + number, 7]
    return torch.tensor([ids])
