"""Tiny random multimodal checkpoints, with their own processors: what a user would have as a directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    BatchFeature,
    CLIPImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from support import tiny_tokenizers
from support.families import widen_weights

_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 48, "intermediate_size": 80}
_TEXT = {
    **_LAYERS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Pictures of 32 x 32 pixels have 16 patches.
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"image_size": 32, "patch_size": 8}
SAMPLING_RATE = 16_000
# How a prompt has a medium, by the functions below.
PLACEHOLDERS = {"idefics3": "<image>", "llava": "<image>", "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}


class Processed:
    """Prompts with random media, as the checkpoint's own processor hands them to a model."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self._processor = processor

    def __call__(self, prompt: str, rng: np.random.Generator, *, begins: bool = True) -> BatchFeature:
        """Processes a prompt.

        Args:
            prompt: with the placeholders of its media.
            rng: of the media.
            begins: whether it is the first of a session.
        """
        if prompt.count("<image>"):
            size = (40, 60, 3)
            images = [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(prompt.count("<image>"))]
            media = {"images": [Image.fromarray(image) for image in images]}
        else:
            sounds = [rng.standard_normal(SAMPLING_RATE, np.float32) for _ in range(prompt.count("<|AUDIO|>"))]
            media = {"audio": sounds, "sampling_rate": SAMPLING_RATE}
        return self._processor(text=prompt, **media, add_special_tokens=begins, return_tensors="pt")


def idefics3(directory: Path) -> Path:
    """Pictures in tiles, of which each becomes four tokens between tokens of its own; the class of SmolVLM's family."""
    tiles = [f"<row_{row}_col_{col}>" for row in (1, 2, 3, 4) for col in (1, 2, 3, 4)]
    tokenizer = _tokenizer(
        "<fake_token_around_image>",
        "<image>",
        "<end_of_utterance>",
        "<global-img>",
        *tiles,
        "<|user|>",
        "<|assistant|>",
    )
    image_processor = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    config = Idefics3Config(
        text_config={"model_type": "llama", **_TEXT, "vocab_size": len(tokenizer)},
        vision_config=_VISION,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    return _write(Idefics3ForConditionalGeneration, config, processor, directory)


def llava(directory: Path) -> Path:
    """Pictures of sixteen tokens, behind two layers of a projector; the language part shares its head's weights."""
    tokenizer = _tokenizer("<image>", "<pad>")
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(image_processor, tokenizer, patch_size=8, vision_feature_select_strategy="default")
    processor.num_additional_image_tokens = 1
    config = LlavaConfig(
        text_config={"model_type": "llama", **_TEXT, "vocab_size": len(tokenizer), "tie_word_embeddings": True},
        vision_config={"model_type": "clip_vision_model", **_VISION, "projection_dim": 32},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )
    return _write(LlavaForConditionalGeneration, config, processor, directory)


def qwen2_audio(directory: Path) -> Path:
    """Sounds of at most two seconds, 25 tokens for each."""
    tokenizer = _tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>")
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=2, sampling_rate=SAMPLING_RATE)
    encoder = {"num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2}
    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **_TEXT, "vocab_size": len(tokenizer)},
        audio_config={**encoder, "encoder_ffn_dim": 48, "max_source_positions": 100},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )
    return _write(Qwen2AudioForConditionalGeneration, config, Qwen2AudioProcessor(extractor, tokenizer), directory)


def _tokenizer(*special: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def _write(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, processor: ProcessorMixin, directory: Path
) -> Path:
    torch.manual_seed(3)
    model = model_class(config).eval()
    widen_weights(model)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
