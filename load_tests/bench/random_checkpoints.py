"""Random checkpoints of about 1 GB in the formats that models are published in, for what loading them takes.

All have the form of a small Llama, with as many layers as make a gigabyte. Quantized weights are written by the layouts
in `microturn.zoo.dequantization`, with random integers and scales of which weights of a usual size come out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from microturn.zoo.store import resolve_model

_HIDDEN, _INNER, _KV = 1024, 2816, 512
SIZES = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
# Of each layer, its weights [out, in] by their names in a safetensors file and in a GGUF file.
_PRODUCTS = {
    ("self_attn.q_proj", "attn_q"): (_HIDDEN, _HIDDEN),
    ("self_attn.k_proj", "attn_k"): (_KV, _HIDDEN),
    ("self_attn.v_proj", "attn_v"): (_KV, _HIDDEN),
    ("self_attn.o_proj", "attn_output"): (_HIDDEN, _HIDDEN),
    ("mlp.gate_proj", "ffn_gate"): (_INNER, _HIDDEN),
    ("mlp.up_proj", "ffn_up"): (_INNER, _HIDDEN),
    ("mlp.down_proj", "ffn_down"): (_HIDDEN, _INNER),
}
_NORMS = {("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")}
_GROUP = 128
_STD = 0.02
# Integers are uniform: of n steps the deviation is n / sqrt(12).
_STEP_4, _STEP_8 = _STD / 4.6, _STD / 74

Parts = dict[str, Tensor]


def write_checkpoints(directory: Path) -> Iterator[Path]:
    """Writes one in each format, when it is asked for."""
    torch.manual_seed(0)
    for dtype, num_layers in ((torch.bfloat16, 36), (torch.float32, 18)):
        path = directory / str(dtype).removeprefix("torch.")
        config = LlamaConfig(**SIZES, num_hidden_layers=num_layers, dtype=dtype)
        LlamaForCausalLM(config).to(dtype).save_pretrained(path)
        yield path
    for name, (quantization, num_layers, weight) in _QUANTIZED.items():
        yield _write_quantized(directory / name, quantization, num_layers, weight)
    yield _write_gguf(directory / "q8_0.gguf", 72)


def _write_quantized(
    path: Path, quantization: dict[str, Any], num_layers: int, weight: Callable[[int, int], Parts]
) -> Path:
    tensors = {
        "model.embed_tokens.weight": torch.randn(SIZES["vocab_size"], _HIDDEN).mul_(_STD).bfloat16(),
        "model.norm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(num_layers):
        for (module, _), shape in _PRODUCTS.items():
            parts = weight(*shape).items()
            tensors |= {f"model.layers.{layer}.{module}.{part}": tensor for part, tensor in parts}
        norms = {f"model.layers.{layer}.{module}.weight" for module, _ in _NORMS}
        tensors |= {name: torch.ones(_HIDDEN, dtype=torch.bfloat16) for name in norms}
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = LlamaConfig(**SIZES, num_hidden_layers=num_layers, dtype=torch.bfloat16).to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config, default=str))
    return path


def _words(*shape: int) -> Tensor:
    """Eight numbers of 4 bits each, int32."""
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def _gptq(num_outputs: int, num_inputs: int) -> Parts:
    num_groups = num_inputs // _GROUP
    return {
        "qweight": _words(num_inputs // 8, num_outputs),
        "qzeros": torch.full((num_groups, num_outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((num_groups, num_outputs), _STEP_4, dtype=torch.float16),
        "g_idx": torch.arange(num_inputs, dtype=torch.int32) // _GROUP,
    }


def _awq(num_outputs: int, num_inputs: int) -> Parts:
    num_groups = num_inputs // _GROUP
    return {
        "qweight": _words(num_inputs, num_outputs // 8),
        "qzeros": torch.full((num_groups, num_outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((num_groups, num_outputs), _STEP_4, dtype=torch.float16),
    }


def _fp8(num_outputs: int, num_inputs: int) -> Parts:
    return {
        "weight": torch.randn(num_outputs, num_inputs).mul_(64).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.full((num_outputs // _GROUP, num_inputs // _GROUP), _STD / 64),
    }


def _int8(num_outputs: int, num_inputs: int) -> Parts:
    return {
        "weight": torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8),
        "weight_scale": torch.full((num_outputs, 1), _STEP_8, dtype=torch.bfloat16),
    }


def _packed(num_outputs: int, num_inputs: int) -> Parts:
    return {
        "weight_packed": _words(num_outputs, num_inputs // 8),
        "weight_scale": torch.full((num_outputs, num_inputs // _GROUP), _STEP_4, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    config = {"format": layout, "config_groups": {"group_0": scheme}, "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "ignore": ["lm_head"], **config}


# What config.json says, layers that make a gigabyte, and the parts of a weight.
_QUANTIZED: dict[str, tuple[dict[str, Any], int, Callable[[int, int], Parts]]] = {
    "gptq-4": ({"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False}, 144, _gptq),
    "awq-4": (
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
        144,
        _awq,
    ),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [_GROUP, _GROUP]}, 72, _fp8),
    "compressed-8": (_compressed("int-quantized", num_bits=8, strategy="channel"), 72, _int8),
    "compressed-4": (_compressed("pack-quantized", num_bits=4, strategy="group", group_size=_GROUP), 144, _packed),
}


def _write_gguf(path: Path, num_layers: int) -> Path:
    """Llama's, with SmolLM2's vocabulary."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(_HIDDEN // SIZES["num_attention_heads"])
    model = json.loads((resolve_model("smollm2-135m") / "tokenizer.json").read_text())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(model["vocab"]))
    writer.add_token_types([1] * SIZES["vocab_size"])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(0)
    rng = np.random.default_rng(0)
    _add_packed(writer, "token_embd.weight", (SIZES["vocab_size"], _HIDDEN), rng)
    for layer in range(num_layers):
        for (_, module), shape in _PRODUCTS.items():
            _add_packed(writer, f"blk.{layer}.{module}.weight", shape, rng)
        for _, module in _NORMS:
            writer.add_tensor(f"blk.{layer}.{module}.weight", np.ones(_HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(_HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_packed(writer: GGUFWriter, name: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    """Adds a weight in Q8_0: blocks of 32 integers of 8 bits behind a scale in float16."""
    blocks = np.empty((shape[0], shape[1] // 32, 34), np.uint8)
    blocks[..., :2] = np.array([_STEP_8], np.float16).view(np.uint8)
    blocks[..., 2:] = rng.integers(0, 256, (*blocks.shape[:2], 32), np.uint8)
    writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=GGMLQuantizationType.Q8_0)
