"""Tiny random models of many architectures, as directories that a server could be pointed at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support import tiny_tokenizers

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
}

# What each architecture needs besides the common shape.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "apertus": _GROUPED,
    "arcee": _GROUPED,
    "bitnet": _GROUPED,
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "rotary_dim": 8},
    "cohere": _GROUPED,
    "cohere2": {**_GROUPED, **_WINDOWED},
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": _GROUPED,
    "exaone4": {**_GROUPED, **_WINDOWED},
    "falcon": {"multi_query": True},
    "gemma": {**_GROUPED, "head_dim": 24},
    "gemma2": {**_GROUPED, **_WINDOWED, "head_dim": 16},
    "gemma3_text": {**_GROUPED, **_WINDOWED, "head_dim": 24},
    "gemma4_text": {
        **_GROUPED,
        **_WINDOWED,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
    },
    "glm": {**_GROUPED, "head_dim": 16, "pad_token_id": 0},
    "glm4": {**_GROUPED, "head_dim": 16, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "gpt_neox": {},
    "gpt_oss": {**_GROUPED, **_EXPERTS, **_WINDOWED, "head_dim": 16},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "rotary_dim": 8},
    "granite": {**_GROUPED, "residual_multiplier": 0.5},
    "granite_swa": {**_GROUPED, **_WINDOWED, "attention_multiplier": 0.25},
    "helium": {**_GROUPED, "head_dim": 16},
    "llama": _GROUPED,
    "llama4_text": {
        **_GROUPED,
        **_EXPERTS,
        "head_dim": 16,
        "intermediate_size_mlp": 96,
        "attention_chunk_size": 32,
        "no_rope_layers": [1, 0],
        "pad_token_id": 0,
    },
    "mamba": {"state_size": 8},
    "mimo_v2_flash": {
        **_GROUPED,
        **_EXPERTS,
        **_WINDOWED,
        "head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mistral": {**_GROUPED, "sliding_window": 24},
    "mixtral": {**_GROUPED, **_EXPERTS},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    "nemotron": _GROUPED,
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, **_WINDOWED},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 0},
    "persimmon": {},
    "phi": _GROUPED,
    "phi3": {**_GROUPED, "pad_token_id": 0},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 24},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "head_dim": 16},
    "seed_oss": {**_GROUPED, "head_dim": 16},
    "smollm3": {**_GROUPED, "pad_token_id": 0, "no_rope_layers": [1, 0]},
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
    "vaultgemma": {**_GROUPED, **_WINDOWED, "head_dim": 16},
}


def write_family(name: str, directory: Path, **changes: Any) -> Path:
    """Writes a model whose weights are wide, so that a mistake changes tokens."""
    tokenizer = tiny_tokenizers.byte_level()
    tiny_tokenizers.save(tokenizer, directory)
    shape = {**_SHAPE, "vocab_size": tokenizer.get_vocab_size(), **FAMILIES[name], **changes}
    config = AutoConfig.for_model(name, **shape)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
            else:  # norms and biases begin as ones and zeros, which would hide that one is left out
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def pristine(directory: Path) -> PreTrainedModel:
    """The model as transformers loads it, with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


@torch.inference_mode()
def pristine_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Logits [n, vocab_size] of one pass, without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits
