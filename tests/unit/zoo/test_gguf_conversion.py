from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.zoo.gguf_conversion import convert_gguf
from support import gguf_files


def _logits(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(5, 55)[None] * 7 % model.config.vocab_size
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_llama_file_becomes_the_model_it_was_made_of(tmp_path: Path, is_tied: bool) -> None:
    original = gguf_files.write_llama(tmp_path / "m.gguf", is_tied=is_tied)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "m")

    assert type(converted) is type(original)
    assert converted.dtype == torch.float32
    assert converted.config.tie_word_embeddings is is_tied
    assert converted.config.rms_norm_eps == 1e-5
    torch.testing.assert_close(_logits(converted), _logits(original), rtol=0, atol=0)


def test_a_gemma3_file_becomes_the_model_it_was_made_of(tmp_path: Path) -> None:
    original = gguf_files.write_gemma3(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "m")

    assert type(converted) is type(original)
    assert converted.config.layer_types == [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]
    assert converted.config.rope_parameters == original.config.rope_parameters
    # (weight + 1) - 1 rounds
    torch.testing.assert_close(_logits(converted), _logits(original), rtol=1e-4, atol=1e-4)


def test_gemmas_end_of_turn_also_ends_generation(tmp_path: Path) -> None:
    gguf_files.write_gemma3(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == [1, 5]


def test_the_weights_file_is_one_that_the_safetensors_library_reads(tmp_path: Path) -> None:
    original = gguf_files.write_llama(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    with safe_open(tmp_path / "m" / "model.safetensors", framework="pt") as weights:
        assert weights.metadata() == {"format": "pt"}
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    assert shapes == {name: tuple(parameter.shape) for name, parameter in original.named_parameters()}


def test_the_config_is_plain_json_with_the_numbers_as_people_write_them(tmp_path: Path) -> None:
    gguf_files.write_llama(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["head_dim"] == 16


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidArgument, match="architecture mamba is not supported"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    assert not (tmp_path / "m").exists()
