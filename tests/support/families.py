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
# As DeepSeek's models name theirs.
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
# Attention over a latent vector, from which keys and values are computed.
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}

# What each architecture needs besides the common shape, by the `model_type` of its config.json.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "afmoe": {**_GROUPED, **_EXPERTS, **_WINDOWED, "head_dim": 16},
    "apertus": _GROUPED,
    "arcee": _GROUPED,
    "bamba": {**_GROUPED, **_MAMBA, "attn_layer_indices": [1], "pad_token_id": 0},
    "biogpt": {},
    "bitnet": _GROUPED,
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {**_GPT, "rotary_dim": 8},
    "cohere": _GROUPED,
    "cohere2": {**_GROUPED, **_WINDOWED},
    "cohere2_moe": {**_GROUPED, **_EXPERTS, **_WINDOWED},
    "cwm": {**_GROUPED, **_WINDOWED, "head_dim": 16, "bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 1024,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1, "head_dim": 8},
    "deepseek_v3": {**_ROUTED, **_LATENT, "first_k_dense_replace": 1},
    "diffllama": _GROUPED,
    "doge": _GROUPED,
    "dots1": {**_GROUPED, **_ROUTED, "first_k_dense_replace": 1, "layer_types": ["full_attention"] * 2},
    "ernie4_5": _GROUPED,
    "ernie4_5_moe": {**_GROUPED, **_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": {**_GROUPED, **_WINDOWED},
    "exaone_moe": {**_GROUPED, **_EXPERTS, **_WINDOWED},
    "falcon": {"multi_query": True},
    "falcon_h1": {**_GROUPED, **_MAMBA, "mamba_d_ssm": 128, "head_dim": 16},
    "flex_olmo": {**_GROUPED, **_EXPERTS},
    "gemma": {**_GROUPED, "head_dim": 24},
    "gemma2": {**_GROUPED, **_WINDOWED, "head_dim": 16},
    "gemma3_text": {**_GROUPED, **_WINDOWED, "head_dim": 24},
    "gemma3n_text": {
        **_GROUPED,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 24,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 512,
    },
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
    "glm4_moe": {**_GROUPED, **_ROUTED, "head_dim": 16, "first_k_dense_replace": 1},
    "glm4_moe_lite": {**_ROUTED, **_LATENT},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 24},
    "gpt_neox": {},
    "gpt_oss": {**_GROUPED, **_EXPERTS, **_WINDOWED, "head_dim": 16},
    "gptj": {**_GPT, "rotary_dim": 8},
    "granite": {**_GROUPED, "residual_multiplier": 0.5},
    "granite_swa": {**_GROUPED, **_WINDOWED, "attention_multiplier": 0.25},
    "granitemoe": {**_GROUPED, **_EXPERTS},
    "granitemoehybrid": {**_GROUPED, **_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"]},
    "granitemoeshared": {**_GROUPED, **_EXPERTS, "shared_intermediate_size": 32},
    "helium": {**_GROUPED, "head_dim": 16},
    "hunyuan_v1_dense": {**_GROUPED, "head_dim": 16},
    "hunyuan_v1_moe": {**_GROUPED, **_EXPERTS, "head_dim": 16, "moe_topk": 2},
    "internlm3": {**_GROUPED, "head_dim": 16},
    "jamba": {
        **_GROUPED,
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "jetmoe": {**_EXPERTS, "num_key_value_heads": 2, "kv_channels": 16},
    "lfm2": {**_GROUPED, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_GROUPED, **_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
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
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "mimo_v2_flash": {**_GROUPED, **_ROUTED, **_WINDOWED, "head_dim": 24, "v_head_dim": 16},
    "minicpm3": _LATENT,
    "minimax": {**_GROUPED, **_EXPERTS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    "minimax_m2": {**_GROUPED, **_EXPERTS, "head_dim": 16},
    "ministral": {**_GROUPED, **_WINDOWED, "head_dim": 16},
    "ministral3": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 24},
    "mixtral": {**_GROUPED, **_EXPERTS},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 1024},
    "nanochat": _GROUPED,
    "nemotron": _GROUPED,
    "nemotron_h": {
        **_GROUPED,
        **_ROUTED,
        "head_dim": 16,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
        "n_groups": 2,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo": _GROUPED,
    "olmo2": _GROUPED,
    "olmo3": {**_GROUPED, **_WINDOWED},
    "olmo_hybrid": {**_GROUPED, "layer_types": ["linear_attention", "full_attention"]},
    "olmoe": {**_GROUPED, **_EXPERTS},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 0},
    "persimmon": {},
    "phi": _GROUPED,
    "phi3": {**_GROUPED, "pad_token_id": 0},
    "phimoe": {**_GROUPED, **_EXPERTS},
    "qwen2": _GROUPED,
    "qwen2_moe": {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3": {**_GROUPED, "head_dim": 24},
    "qwen3_5_moe_text": {**_GROUPED, **_EXPERTS, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": {**_GROUPED, **_DELTA, "head_dim": 16},
    "qwen3_moe": {**_GROUPED, **_EXPERTS, "head_dim": 16},
    "qwen3_next": {**_GROUPED, **_EXPERTS, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 32},
    "recurrent_gemma": {**_GROUPED, "lru_width": 64, "attention_window_size": 24, "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 64},
    "seed_oss": {**_GROUPED, "head_dim": 16},
    "smollm3": {**_GROUPED, "pad_token_id": 0, "no_rope_layers": [1, 0]},
    "solar_open": {**_GROUPED, **_ROUTED, "head_dim": 16},
    "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
    "vaultgemma": {**_GROUPED, **_WINDOWED, "head_dim": 16},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "youtu": _LATENT,
    # The attention of its layers is one, with the same weights.
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 16,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
    },
}


def write_family(name: str, directory: Path, **changes: Any) -> Path:
    """Writes a model whose weights are wide, so that a mistake changes tokens; its layers are stored in bfloat16."""
    tokenizer = tiny_tokenizers.byte_level()
    tiny_tokenizers.save(tokenizer, directory)
    shape = {**_SHAPE, "vocab_size": tokenizer.get_vocab_size(), **FAMILIES[name], **changes}
    config = AutoConfig.for_model(name, **shape)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config).eval()
    widen_weights(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def widen_weights(model: PreTrainedModel) -> None:
    """Makes random weights so wide that a mistake changes tokens."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.25)
        else:  # norms and biases begin as ones and zeros, which would hide that one is left out
            parameter.add_(0.2 * torch.randn_like(parameter))


def pristine(directory: Path) -> PreTrainedModel:
    """The model as transformers loads it, with transformers' own attention."""
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


@torch.inference_mode()
def pristine_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Logits [n, vocab_size] of one pass, without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits
