"""The encoder of a multimodal checkpoint on the client's side: what it makes, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    BatchFeature,
    CLIPConfig,
    CLIPModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.utils import logging

from microturn_client import InvalidArgument
from microturn_client.media import MediaEncoder
from support import media_checkpoints
from support.media_checkpoints import PLACEHOLDERS, Processed
from support.tiny_model_dir import write_tiny_model

TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
IMAGE = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return media_checkpoints.qwen2_audio(tmp_path_factory.mktemp("checkpoint") / "qwen2_audio")


@pytest.fixture(scope="module")
def encoder(checkpoint: Path) -> MediaEncoder:
    return MediaEncoder(checkpoint)


@pytest.fixture
def inputs(checkpoint: Path) -> BatchFeature:
    process = Processed(AutoProcessor.from_pretrained(checkpoint))
    return process(f"It {PLACEHOLDERS['qwen2_audio']} rings", np.random.default_rng(1))


def test_text_is_ids_and_media_are_embeddings(encoder: MediaEncoder, inputs: BatchFeature) -> None:
    before, sound, behind = encoder.pieces(inputs)
    assert sound.shape == (25, encoder.hidden_size)  # of a second
    ids = inputs["input_ids"][0].tolist()
    assert (before, behind) == (ids[: len(before)], ids[len(before) + 25 :])
    assert encoder.pieces({"input_ids": inputs["input_ids"][:, :4]}) == [ids[:4]]


def test_another_type_of_floats_is_near(checkpoint: Path, encoder: MediaEncoder, inputs: BatchFeature) -> None:
    _, exact, _ = encoder.pieces(inputs)
    _, rounded, _ = MediaEncoder(checkpoint, dtype=torch.bfloat16).pieces(inputs)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_the_language_part_takes_no_memory(checkpoint: Path, encoder: MediaEncoder) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    of_encoder = sum(weight.numel() for name, weight in stored.items() if not name.startswith("language_model."))
    assert sum(weight.numel() for weight in encoder._model.parameters()) == of_encoder


@pytest.mark.parametrize("has_bars", [True, False])
def test_transformers_says_afterwards_what_it_said_before(checkpoint: Path, has_bars: bool) -> None:
    """Our own commands, run by other tests in this process, have no bars."""
    logging.set_verbosity_info()
    had_bars = logging.is_progress_bar_enabled()
    set_bars = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    set_bars[has_bars]()
    try:
        MediaEncoder(checkpoint)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled() == has_bars
    finally:
        logging.set_verbosity_warning()
        set_bars[had_bars]()


def _changed(inputs: BatchFeature, name: str) -> dict[str, Any]:
    ids, changed = inputs["input_ids"], dict(inputs)
    if name == "two prompts":
        return changed | {"input_ids": ids.expand(2, -1)}
    if name == "a list":
        return changed | {"input_ids": ids[0].tolist()}
    if name == "padding":
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        return changed | {"attention_mask": mask}
    if name == "too few placeholders":
        at = int((ids[0] == ids[0].mode().values).nonzero()[0])
        kept = [place for place in range(ids.shape[1]) if place != at]
        return changed | {"input_ids": ids[:, kept], "attention_mask": torch.ones(1, len(kept))}
    if name == "a placeholder for all":
        short = torch.cat([ids[:, :6], ids[:, 30:]], 1)
        return changed | {"input_ids": short, "attention_mask": torch.ones_like(short)}
    if name == "a sound that is not a number":
        return changed | {"input_features": torch.full_like(inputs["input_features"], torch.nan)}
    return {key: value for key, value in changed.items() if key != "feature_attention_mask"}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("two prompts", r"one prompt at a time: input_ids are a tensor \[1, n\]"),
        ("a list", "one prompt at a time"),
        ("padding", "a prompt has no padding"),
        ("too few placeholders", "Qwen2AudioModel cannot encode this: .*do not match"),
        ("a placeholder for all", "hands no embedding for each token"),
        ("a sound that is not a number", "returned what is not finite"),
        ("an input that lacks", "Qwen2AudioModel cannot encode this"),
    ],
)
def test_inputs_that_cannot_be_encoded(encoder: MediaEncoder, inputs: BatchFeature, name: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        encoder.pieces(_changed(inputs, name))


def test_a_directory_without_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot load an encoder from .*nowhere"):
        MediaEncoder(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="is a llama, which has no encoder before a language part"):
        MediaEncoder(write_tiny_model(tmp_path / "llama"))


def test_an_encoder_beside_a_language_part(tmp_path: Path) -> None:
    CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION)).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="is a clip, which has no encoder before a language part"):
        MediaEncoder(tmp_path)


def test_an_encoder_that_lacks_weights(tmp_path: Path) -> None:
    checkpoint = media_checkpoints.llava(tmp_path / "llava")
    weights = load_file(checkpoint / "model.safetensors")
    del weights["multi_modal_projector.linear_2.bias"]
    save_file(weights, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidArgument, match=r"lacks an encoder's weights: multi_modal_projector\.linear_2\.bias$"):
        MediaEncoder(checkpoint)


def _write(model_class: type[PreTrainedModel], config: PreTrainedConfig, directory: Path) -> MediaEncoder:
    model_class(config).save_pretrained(directory)
    return MediaEncoder(directory)


def test_positions_in_several_dimensions_are_refused(tmp_path: Path) -> None:
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "mlp_ratio": 1}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    text = {**TEXT, "rope_parameters": rope}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=31)
    encoder = _write(Qwen2VLForConditionalGeneration, config, tmp_path / "qwen2_vl")
    ids = torch.tensor([[1, 31, IMAGE, 2]])
    image = {"pixel_values": torch.randn(4, 3 * 2 * 16), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(InvalidArgument, match="hands position_ids to its language part beside embeddings"):
        encoder.pieces({"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), **image})


def test_a_mask_of_its_own_is_refused(tmp_path: Path) -> None:
    """In Gemma 3 the tokens of an image see each other both ways."""
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, mm_tokens_per_image=4)
    encoder = _write(Gemma3ForConditionalGeneration, config, tmp_path / "gemma3")
    ids = torch.tensor([[1, *[IMAGE] * 4, 2]])
    with pytest.raises(InvalidArgument, match="hands attention_mask to its language part beside embeddings"):
        encoder.pieces(
            {"input_ids": ids, "token_type_ids": (ids == IMAGE).int(), "pixel_values": torch.randn(1, 3, 8, 8)}
        )
