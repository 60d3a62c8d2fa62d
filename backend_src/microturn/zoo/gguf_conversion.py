"""Converts a GGUF file to a Hugging Face model directory with float32 weights.

Supports the architectures llama and gemma3 as llama.cpp writes them. The safetensors file is written tensor by tensor,
so that memory holds one dequantized tensor and not the model.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize
from tqdm import tqdm

from microturn.errors import InvalidArgument
from microturn.zoo.gguf_tokenizer import write_tokenizer

# Rows dequantized at once: an embedding has 262,144, and the temporary copies should stay in the CPU's caches.
_ROWS_AT_ONCE = 1024

Float32Array = npt.NDArray[np.float32]

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_MODULES_OF = {
    "llama": _MODULES | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _MODULES
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}

# Gemma 3 constants that GGUF files omit: every sixth layer has full attention, the others have their own RoPE base.
_GEMMA3_LAYERS_PER_FULL_ATTENTION = 6
_GEMMA3_LOCAL_ROPE_THETA = 10_000.0


def convert_gguf(gguf_path: Path, model_dir: Path, *, label: str) -> None:
    """Creates ``model_dir`` with config, generation config, tokenizer files and model.safetensors.

    Args:
        gguf_path: a llama or gemma3 model, quantized in any way that the gguf package can undo.
        model_dir: a directory that does not exist. After an error it may be incomplete.
        label: of the model in the progress bar.

    Errors:
        InvalidArgument: another architecture or tokenizer.
        OSError: the directory cannot be written.
    """
    tqdm.write(f"{label}: reading the vocabulary", file=sys.stderr)
    reader = GGUFReader(gguf_path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    architecture = metadata["general.architecture"]
    if architecture not in _MODULES_OF:
        raise InvalidArgument(f"the GGUF architecture {architecture} is not supported: give a Hugging Face directory")
    config = _config(metadata, is_tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    model_dir.mkdir()
    _write_json(model_dir / "config.json", config)
    _write_json(
        model_dir / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_tokenizer(metadata, model_dir, max_len=config["max_position_embeddings"])
    _write_weights(reader, model_dir / "model.safetensors", config, label)


def _config(metadata: Mapping[str, Any], *, is_tied: bool) -> dict[str, Any]:
    architecture = metadata["general.architecture"]
    hyper = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    common = {
        "dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hyper["embedding_length"],
        "intermediate_size": hyper["feed_forward_length"],
        "num_hidden_layers": hyper["block_count"],
        "num_attention_heads": hyper["attention.head_count"],
        "num_key_value_heads": hyper["attention.head_count_kv"],
        "max_position_embeddings": hyper["context_length"],
        "rms_norm_eps": _shortest(hyper["attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": is_tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
    rope = {"rope_type": "default", "rope_theta": _shortest(hyper["rope.freq_base"])}
    if architecture == "llama":
        return common | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "head_dim": hyper["rope.dimension_count"],
            "rope_parameters": rope,
        }
    end_of_turn_id = metadata["tokenizer.ggml.tokens"].index("<end_of_turn>")
    return common | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "head_dim": hyper["attention.key_length"],
        "query_pre_attn_scalar": hyper["attention.key_length"],
        "sliding_window": hyper["attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if (layer + 1) % _GEMMA3_LAYERS_PER_FULL_ATTENTION else "full_attention"
            for layer in range(hyper["block_count"])
        ],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_ROPE_THETA},
        },
        "eos_token_id": [common["eos_token_id"], end_of_turn_id],
    }


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the float32 value: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _write_weights(reader: GGUFReader, path: Path, config: Mapping[str, Any], label: str) -> None:
    """Writes all tensors as float32 in the safetensors format: a JSON table of offsets, then the bytes."""
    modules = _MODULES_OF["gemma3" if config["model_type"] == "gemma3_text" else "llama"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        begin, end = end, end + 4 * int(tensor.n_elements)
        shape = tensor.shape[::-1].tolist()  # GGUF names the fastest dimension first
        header[_parameter_name(tensor.name, modules)] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    header_json = json.dumps(header).encode()
    header_json += b" " * (-len(header_json) % 8)
    with path.open("wb") as weights:
        weights.write(struct.pack("<Q", len(header_json)))
        weights.write(header_json)
        for tensor in tqdm(reader.tensors, desc=f"{label}: dequantizing", unit="tensor"):
            values = _undo_llama_cpp(tensor.name, _dequantize(tensor), config)
            weights.write(np.ascontiguousarray(values, dtype="<f4").data)


def _dequantize(tensor: ReaderTensor) -> Float32Array:
    values = np.empty(tensor.shape[::-1], dtype=np.float32)
    for begin in range(0, len(values), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        values[rows] = dequantize(tensor.data[rows], tensor.tensor_type)
    return values


def _parameter_name(gguf_name: str, modules: Mapping[str, str]) -> str:
    """``blk.3.attn_q.weight`` becomes ``model.layers.3.self_attn.q_proj.weight``."""
    *block, module, kind = gguf_name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{modules[module]}.{kind}"


def _undo_llama_cpp(gguf_name: str, values: Float32Array, config: Mapping[str, Any]) -> Float32Array:
    """Undoes what llama.cpp's converter changed besides names and types."""
    if config["model_type"] == "gemma3_text":
        # Gemma's RMSNorm multiplies by 1 + weight; the file holds the sum.
        return values - 1 if gguf_name.endswith("norm.weight") else values
    # llama.cpp rotates neighbouring rows of a head (0 1, 2 3, ...), transformers rows that are half a head apart.
    if gguf_name.endswith("attn_q.weight"):
        return _pairs_to_halves(values, config["num_attention_heads"])
    if gguf_name.endswith("attn_k.weight"):
        return _pairs_to_halves(values, config["num_key_value_heads"])
    return values


def _pairs_to_halves(values: Float32Array, num_heads: int) -> Float32Array:
    """Reorders rows ``[heads * head_dim, in]`` from rotary pairs side by side to rotary pairs half a head apart."""
    return values.reshape(num_heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
