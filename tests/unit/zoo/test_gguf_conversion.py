from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.zoo import gguf_conversion
from microturn.zoo.gguf_conversion import convert_gguf, converted_bytes
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


@pytest.mark.parametrize(
    "write",
    [
        partial(gguf_files.write_qwen, model_type="qwen2"),
        partial(gguf_files.write_qwen, model_type="qwen3"),
        gguf_files.write_llama3,
        gguf_files.write_mistral,
    ],
    ids=["qwen2", "qwen3", "llama3", "mistral"],
)
def test_a_file_of_another_family_becomes_the_model_it_was_made_of(
    tmp_path: Path, write: Callable[[Path], PreTrainedModel]
) -> None:
    original = write(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert type(converted) is type(original)
    assert converted.config.rope_parameters == original.config.rope_parameters
    torch.testing.assert_close(_logits(converted), _logits(original), rtol=0, atol=0)


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


def test_llama3s_end_of_turn_also_ends_generation(tmp_path: Path) -> None:
    gguf_files.write_llama3(tmp_path / "m.gguf")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    assert GenerationConfig.from_pretrained(tmp_path / "m").eos_token_id == [2, 0]


def _write_header(path: Path, architecture: str, add: Callable[[GGUFWriter], None] = lambda _: None) -> None:
    """A file without the vocabulary and weights of its architecture."""
    writer = GGUFWriter(path, architecture)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_another_architecture_is_refused_by_name_with_those_that_are_known(tmp_path: Path) -> None:
    _write_header(tmp_path / "m.gguf", "mamba")
    with pytest.raises(InvalidArgument, match="architecture mamba is not supported, llama, qwen2, qwen3, gemma3 are"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.attn_q.bias"])
def test_another_tensor_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Mixtral's architecture is called llama too; and transformers drops a bias that the config does not announce."""
    _write_header(tmp_path / "m.gguf", "llama", lambda writer: writer.add_tensor(name, np.zeros((4, 4), np.float32)))
    with pytest.raises(InvalidArgument, match=f"tensor {name} is not supported"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "m", label="m")


def test_another_scaling_of_rope_is_refused() -> None:
    scaled = {"rope.scaling.type": "yarn"}
    with pytest.raises(InvalidArgument, match="RoPE scaling yarn is not supported"):
        gguf_conversion._rope(scaled, None)
    with pytest.raises(InvalidArgument, match="frequencies of RoPE are not Llama 3's"):
        gguf_conversion._rope({}, np.array([1, 1, 3, 8], np.float32))
    assert gguf_conversion._rope({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, None) == {
        "rope_type": "linear",
        "rope_theta": 10_000.0,
        "factor": 8.0,
    }


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    gguf_files.write_llama(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for num_bytes in (len(whole) - 1, len(whole) // 2, 500, 10, 0):
        (tmp_path / "m.gguf").write_bytes(whole[:num_bytes])
        with pytest.raises(InvalidArgument, match=r"m\.gguf cannot be read as a whole GGUF file"):
            converted_bytes(tmp_path / "m.gguf")
