"""Converts a GGUF file to a Hugging Face model directory with float32 weights.

Supports the architectures in `_MODULES_OF` as llama.cpp writes them. The safetensors file is written tensor by tensor,
so that memory holds one dequantized tensor and not the model.

Transformers can read GGUF files too. It is not used: it holds the whole model, needs another package (accelerate),
takes an unknown pre-tokenizer for GPT-2's, and reads Llama 3.1's RoPE as unscaled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize
from tqdm import tqdm

from microturn.errors import InvalidArgument
from microturn.zoo.gguf_tokenizer import check_tokenizer, special_ids, write_tokenizer
from microturn.zoo.safetensors_file import TensorEntry, write_safetensors

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
_LLAMA = _MODULES | {"ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MODULES_OF = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | _HEAD_NORMS,
    "gemma3": _MODULES
    | _HEAD_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_BIASED = {("qwen2", module) for module in ("attn_q", "attn_k", "attn_v")}
_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_LLAMA3_FREQS = "rope_freqs.weight"  # no parameter: by what Llama 3.1 and later divide the frequencies of RoPE

# Gemma 3 constants that GGUF files omit: every sixth layer has full attention, the others have their own RoPE base.
_GEMMA3_LAYERS_PER_FULL_ATTENTION = 6
_GEMMA3_27B_LAYERS = 62
_GEMMA3_LOCAL_ROPE_THETA = 10_000.0


class _Model:
    """A GGUF file with an architecture, tensors and a vocabulary that are known.

    Errors:
        InvalidArgument: it is another file.
    """

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
            self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise InvalidArgument(f"{path} cannot be read as a whole GGUF file: {error}") from error
        architecture = self.metadata["general.architecture"]
        if architecture not in _MODULES_OF:
            raise InvalidArgument(
                f"the GGUF architecture {architecture} is not supported, {', '.join(_MODULES_OF)} are: "
                "give a Hugging Face directory"
            )
        weights = [tensor for tensor in reader.tensors if tensor.name != _LLAMA3_FREQS]
        self.tensors = {_parameter_name(tensor.name, architecture): tensor for tensor in weights}
        freqs = next((tensor.data for tensor in reader.tensors if tensor.name == _LLAMA3_FREQS), None)
        self.config = _config(self.metadata, is_tied="lm_head.weight" not in self.tensors, freqs=freqs)
        check_tokenizer(self.metadata)

    def entries(self) -> list[TensorEntry]:
        """All weights as float32; GGUF names the fastest dimension first."""
        return [TensorEntry(name, "F32", tensor.shape[::-1].tolist()) for name, tensor in self.tensors.items()]


def gguf_config(gguf_path: Path) -> dict[str, Any]:
    """The config.json that a converted file has.

    Errors:
        InvalidArgument: `convert_gguf` cannot convert it.
    """
    return _Model(gguf_path).config


def converted_bytes(gguf_path: Path) -> int:
    """Disk space of a converted file, without its small files.

    Errors:
        InvalidArgument: `convert_gguf` cannot convert it.
    """
    return sum(entry.num_bytes for entry in _Model(gguf_path).entries())


def convert_gguf(gguf_path: Path, model_dir: Path, *, label: str) -> None:
    """Creates ``model_dir`` with config, generation config, tokenizer files and model.safetensors.

    Args:
        gguf_path: a model of an architecture in `_MODULES_OF`, quantized in any way that the gguf package can undo.
        model_dir: a directory that does not exist. After an error it may be incomplete.
        label: of the model in the progress bar.

    Errors:
        InvalidArgument: another architecture or tokenizer.
        OSError: the directory cannot be written.
    """
    tqdm.write(f"{label}: reading the vocabulary", file=sys.stderr)
    model = _Model(gguf_path)
    config = model.config
    model_dir.mkdir()
    _write_json(model_dir / "config.json", config)
    _write_json(model_dir / "generation_config.json", special_ids(model.metadata))
    write_tokenizer(model.metadata, model_dir, max_len=config["max_position_embeddings"])
    tensors = tqdm(model.tensors.values(), desc=f"{label}: dequantizing", unit="tensor")
    values = (_undo_llama_cpp(tensor.name, _dequantize(tensor), config) for tensor in tensors)
    contents = (np.ascontiguousarray(value, dtype="<f4").data for value in values)
    write_safetensors(model_dir / "model.safetensors", model.entries(), contents)


def _config(metadata: Mapping[str, Any], *, is_tied: bool, freqs: Float32Array | None) -> dict[str, Any]:
    architecture = metadata["general.architecture"]
    hyper = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    model_type, class_name = _CLASSES[architecture]
    num_heads = hyper["attention.head_count"]
    rotated_dim = hyper.get("rope.dimension_count", hyper["embedding_length"] // num_heads)
    rope = _rope(hyper, freqs)
    config = {
        "dtype": "float32",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hyper["embedding_length"],
        "intermediate_size": hyper["feed_forward_length"],
        "num_hidden_layers": hyper["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": hyper.get("attention.head_count_kv", num_heads),
        "max_position_embeddings": hyper["context_length"],
        "rms_norm_eps": _shortest(hyper["attention.layer_norm_rms_epsilon"]),
        "tie_word_embeddings": is_tied,
        **special_ids(metadata),
        "architectures": [class_name],
        "model_type": model_type,
        "head_dim": hyper.get("attention.key_length", rotated_dim),
    }
    return config | (_gemma3(config, hyper, rope) if architecture == "gemma3" else {"rope_parameters": rope})


def _gemma3(config: Mapping[str, Any], hyper: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has besides the common config."""
    num_layers = config["num_hidden_layers"]
    # As llama.cpp does: only the model of 27B scales by another size than its heads'.
    is_27b = num_layers == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": hyper["attention.sliding_window"],
        "layer_types": [
            "sliding_attention" if (layer + 1) % _GEMMA3_LAYERS_PER_FULL_ATTENTION else "full_attention"
            for layer in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": _GEMMA3_LOCAL_ROPE_THETA},
        },
    }


def _rope(hyper: Mapping[str, Any], freqs: Float32Array | None) -> dict[str, Any]:
    """The parameters of RoPE.

    Errors:
        InvalidArgument: a scaling that is neither linear nor Llama 3's.
    """
    rope = {"rope_type": "default", "rope_theta": _shortest(hyper.get("rope.freq_base", 10_000.0))}
    scaling = hyper.get("rope.scaling.type", "none")
    if scaling == "linear":
        return rope | {"rope_type": "linear", "factor": _shortest(hyper["rope.scaling.factor"])}
    if scaling != "none":
        raise InvalidArgument(f"the GGUF file's RoPE scaling {scaling} is not supported: give a Hugging Face directory")
    if freqs is None:
        return rope
    # The file has the quotients alone; all published models have these constants besides the factor.
    rope |= {
        "rope_type": "llama3",
        "factor": float(freqs.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(freqs, _llama3_quotients(rope, len(freqs)), rtol=1e-4):
        raise InvalidArgument("the GGUF file's frequencies of RoPE are not Llama 3's: give a Hugging Face directory")
    return rope


def _llama3_quotients(rope: Mapping[str, Any], num_pairs: int) -> Float32Array:
    """By what each pair's frequency is divided: as it was where it turns often, the factor where it turns rarely."""
    turns = (
        rope["original_max_position_embeddings"]
        / (2 * np.pi)
        * rope["rope_theta"] ** -(np.arange(num_pairs) / num_pairs)
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((turns - low) / (high - low), 0, 1)
    quotients: Float32Array = (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)
    return quotients


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the float32 value: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _dequantize(tensor: ReaderTensor) -> Float32Array:
    values = np.empty(tensor.shape[::-1], dtype=np.float32)
    for begin in range(0, len(values), _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        values[rows] = dequantize(tensor.data[rows], tensor.tensor_type)
    return values


def _parameter_name(gguf_name: str, architecture: str) -> str:
    """``blk.3.attn_q.weight`` becomes ``model.layers.3.self_attn.q_proj.weight``.

    Errors:
        InvalidArgument: the architecture has no such tensor.
    """
    *block, module, kind = gguf_name.split(".")
    modules = _MODULES_OF[architecture]
    if module not in modules or (kind != "weight" and (architecture, module) not in _BIASED):
        raise InvalidArgument(f"the GGUF file's tensor {gguf_name} is not supported: give a Hugging Face directory")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{modules[module]}.{kind}"


def _undo_llama_cpp(gguf_name: str, values: Float32Array, config: Mapping[str, Any]) -> Float32Array:
    """Undoes what llama.cpp's converter changed besides names and types."""
    if config["model_type"] == "gemma3_text":
        # Gemma's RMSNorm multiplies by 1 + weight; the file holds the sum.
        return values - 1 if gguf_name.endswith("norm.weight") else values
    if config["model_type"] != "llama":
        return values
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
