"""Writes small GGUF files the way llama.cpp's converter does, and packs files into wheels."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from microturn.zoo.embedded_models import EmbeddedModel, WheelPart

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
Vocabulary = list[tuple[str, int]]

# As the files of the two embedded models begin.
SMOLLM_VOCABULARY: Vocabulary = [
    *((token, CONTROL) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    *((char, NORMAL) for char in sorted(ByteLevel.alphabet())),
    *((token, NORMAL) for token in ("he", "ll", "hell", "hello", "Ġhello", "12", "ĊĊ")),
]
SMOLLM_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ċ Ċ"]
GEMMA_VOCABULARY: Vocabulary = [
    *((token, CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")),
    *((token, USER_DEFINED) for token in ("\n", "\n\n", "  ", "   ")),
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((token, NORMAL) for token in ("he", "ll", "▁a", "hell", "llo", "hello", "▁hello")),
    *((char, NORMAL) for char in "▁abcdefghijklmnopqrstuvwxyz0123456789日本"),
]
MISTRAL_VOCABULARY: Vocabulary = [
    ("<unk>", UNKNOWN),
    *((token, CONTROL) for token in ("<s>", "</s>")),
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((token, NORMAL) for token in ("▁h", "he", "ll", "▁hell", "▁hello", "llo", "hello", "▁▁", "▁▁▁")),
    *((char, NORMAL) for char in "▁abcdefghijklmnopqrstuvwxyz0123456789日本"),
]
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
}
_MODEL_MAP = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def write_llama(path: Path, *, is_tied: bool = True) -> PreTrainedModel:
    """Write a random llama with grouped heads and SmolLM's kind of tokenizer; return the model that is in the file."""
    config = LlamaConfig(
        vocab_size=len(SMOLLM_VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=is_tied,
        initializer_range=0.25,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000.0},
    )
    model = _randomize(LlamaForCausalLM(config))
    writer = GGUFWriter(path, "llama")
    _add_hyperparameters(writer, config)
    writer.add_rope_freq_base(5_000.0)
    writer.add_rope_dimension_count(16)
    _add_byte_level(writer, "smollm")
    _add_weights(writer, model, _MODEL_MAP | {"post_attention_layernorm": "ffn_norm", "lm_head": "output"})
    return model


def write_gemma3(path: Path) -> PreTrainedModel:
    """Write a random Gemma 3 whose seventh layer slides again; return the model that is in the file."""
    config = Gemma3TextConfig(
        vocab_size=len(GEMMA_VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=8,
        max_position_embeddings=256,
        initializer_range=0.25,
        bos_token_id=2,
        eos_token_id=[1, 5],
        pad_token_id=0,
    )
    model = _randomize(Gemma3ForCausalLM(config))
    writer = GGUFWriter(path, "gemma3")
    _add_hyperparameters(writer, config)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(8)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    _add_vocabulary(writer, GEMMA_VOCABULARY, bos=2, eos=1, unk=3, pad=0)
    _add_weights(writer, model, _MODEL_MAP | _GEMMA_NORMS)
    return model


def write_qwen(path: Path, model_type: str) -> PreTrainedModel:
    """Write a random Qwen 2 (with biases) or Qwen 3 (with norms of heads); return the model that is in the file."""
    config = AutoConfig.for_model(model_type, **_SHAPE, vocab_size=len(SMOLLM_VOCABULARY), tie_word_embeddings=True)
    if model_type == "qwen3":
        config.head_dim = 24
    model = _randomize(AutoModelForCausalLM.from_config(config))
    writer = GGUFWriter(path, model_type)
    _add_hyperparameters(writer, config)
    writer.add_rope_freq_base(5_000.0)
    if model_type == "qwen3":
        writer.add_key_length(24)
        writer.add_value_length(24)
    _add_byte_level(writer, "qwen2")
    _add_weights(writer, model, _MODEL_MAP | {"post_attention_layernorm": "ffn_norm"})
    return model


def write_llama3(path: Path) -> PreTrainedModel:
    """Write a random Llama 3.1, whose scaled RoPE is in the file as a tensor; return the model that is in the file."""
    scaled = {"rope_type": "llama3", "rope_theta": 5_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(**{**_SHAPE, "rope_parameters": scaled}, vocab_size=len(SMOLLM_VOCABULARY))
    model = _randomize(LlamaForCausalLM(config))
    writer = GGUFWriter(path, "llama")
    _add_hyperparameters(writer, config)
    writer.add_rope_freq_base(5_000.0)
    writer.add_rope_dimension_count(16)
    _add_byte_level(writer, "llama-bpe", pad=None)
    writer.add_eot_token_id(0)
    plain = 5_000.0 ** -(torch.arange(0, 16, 2) / 16)
    writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    _add_weights(writer, model, _MODEL_MAP | {"post_attention_layernorm": "ffn_norm", "lm_head": "output"})
    return model


def write_mistral(path: Path) -> PreTrainedModel:
    """Write a random Mistral, which is a llama with SentencePiece's tokenizer; return the model that is in the file."""
    config = LlamaConfig(**_SHAPE, vocab_size=len(MISTRAL_VOCABULARY))
    model = _randomize(LlamaForCausalLM(config))
    writer = GGUFWriter(path, "llama")
    _add_hyperparameters(writer, config)
    writer.add_rope_freq_base(5_000.0)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([-float(token_id) for token_id in range(len(MISTRAL_VOCABULARY))])
    _add_vocabulary(writer, MISTRAL_VOCABULARY, bos=1, eos=2, unk=0, pad=None)
    _add_weights(writer, model, _MODEL_MAP | {"post_attention_layernorm": "ffn_norm", "lm_head": "output"})
    return model


def only_source_of_pip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder from which alone pip installs: nothing leaves the machine."""
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def pack_as_wheels(model_name: str, gguf_path: Path, wheel_dir: Path, *, num_parts: int = 2) -> EmbeddedModel:
    """Cut a GGUF file into wheels that pip accepts, and describe them as an embedded model."""
    content = gguf_path.read_bytes()
    piece_len = -(-len(content) // num_parts)
    parts = []
    for number in range(num_parts):
        package = f"{model_name}_part{number}"
        part = WheelPart(f"{package.replace('_', '-')}==1.0", f"{package}/piece", piece_len)
        parts.append(part)
        dist_info = f"{package}-1.0.dist-info"
        with zipfile.ZipFile(wheel_dir / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(part.member, content[number * piece_len : (number + 1) * piece_len])
            wheel.writestr(f"{dist_info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            wheel.writestr(f"{dist_info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{dist_info}/RECORD", "")
    return EmbeddedModel(model_name, tuple(parts), hashlib.sha256(content).hexdigest(), 10_000_000, "none")


def _randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Weights wide enough to show a wrong row; norms too, which start out as constants."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model.eval()


def _add_hyperparameters(writer: GGUFWriter, config: LlamaConfig | Gemma3TextConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_byte_level(writer: GGUFWriter, pre: str, pad: int | None = 2) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_merges(SMOLLM_MERGES)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_vocabulary(writer, SMOLLM_VOCABULARY, bos=1, eos=2, unk=0, pad=pad)


def _add_vocabulary(
    writer: GGUFWriter, vocabulary: Vocabulary, *, bos: int, eos: int, unk: int, pad: int | None
) -> None:
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([kind for _, kind in vocabulary])
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(unk)
    if pad is not None:
        writer.add_pad_token_id(pad)


def _add_weights(writer: GGUFWriter, model: PreTrainedModel, names: dict[str, str]) -> None:
    """Add all weights under llama.cpp's names and in its order of rows, and finish the file."""
    config = model.config
    is_llama, is_gemma = config.model_type == "llama", config.model_type == "gemma3_text"
    for name, parameter in model.named_parameters():
        *path, module, kind = name.removeprefix("model.").split(".")
        block = f"blk.{path[1]}." if path[:1] == ["layers"] else ""
        gguf_name = block + names[".".join([*path[2:], module])] + f".{kind}"
        values = parameter.detach().numpy().copy()
        if gguf_name == "token_embd.weight":
            packed = quantize(values, GGMLQuantizationType.Q8_0)
            parameter.data.copy_(torch.from_numpy(dequantize(packed, GGMLQuantizationType.Q8_0)))
            writer.add_tensor(gguf_name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
            continue
        if is_llama and gguf_name.endswith("attn_q.weight"):
            values = _halves_to_pairs(values, config.num_attention_heads)
        elif is_llama and gguf_name.endswith("attn_k.weight"):
            values = _halves_to_pairs(values, config.num_key_value_heads)
        elif is_gemma and gguf_name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _halves_to_pairs(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of a head's first half and row i of its second become neighbours, as llama.cpp rotates them."""
    heads = np.split(values, num_heads)
    return np.concatenate([np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in heads])
