"""Tiny random models of several shapes, initialised wide: with the usual 0.02 a position off by one would not show."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import (
    Exaone4Config,
    Exaone4ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from microturn.model import runner, stock
from microturn.zoo.embedded_models import EMBEDDED_MODELS
from microturn.zoo.store import resolve_model
from support.rounded import rounded

VOCAB_SIZE = 311
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}


def real_names(config: pytest.Config) -> list[str]:
    """Models with real weights: SmolLM2, and with --full Gemma 3, which takes several times as long."""
    return ["smollm2-135m", *(["gemma3-270m"] if config.option.full else [])]


@cache
def loaded(model_dir: str, device: str) -> PreTrainedModel:
    """A model with real weights, loaded once for all tests."""
    return runner.load_model(model_dir, device=device)


def by_name(name: str, device: str) -> PreTrainedModel:
    """One with real weights on a device, or a function's of this module on the CPU."""
    if name in EMBEDDED_MODELS:
        return loaded(str(resolve_model(name)), device)
    model: PreTrainedModel = globals()[name]()
    return model


def grouped_heads() -> PreTrainedModel:
    """Six query heads over two KV heads of size 24, with query and key norms."""
    config = Qwen3Config(num_attention_heads=6, num_key_value_heads=2, head_dim=24, **_COMMON)
    return _build(Qwen3ForCausalLM, config)


def sliding_window(vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """Layers that see 20 tokens back, between one that sees all."""
    config = Gemma3TextConfig(
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **{**_COMMON, "vocab_size": vocab_size},
    )
    return _build(Gemma3ForCausalLM, config)


def soft_caps() -> PreTrainedModel:
    """Caps below many scores and logits, and layers that see 20 tokens back, between those that see all."""
    config = Gemma2Config(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        sliding_window=20,
        **_COMMON,
    )
    return _build(Gemma2ForCausalLM, config)


def only_sliding() -> PreTrainedModel:
    """Layers that see 20 tokens back, and none that sees more."""
    config = MistralConfig(num_attention_heads=4, num_key_value_heads=2, sliding_window=20, **_COMMON)
    return _build(MistralForCausalLM, config)


def llama() -> PreTrainedModel:
    """As many KV heads as query heads."""
    return _build(LlamaForCausalLM, LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **_COMMON))


def neighbouring_pairs() -> PreTrainedModel:
    """Pairs of neighbours are rotated."""
    return _build(HeliumForCausalLM, HeliumConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=12, **_COMMON))


def no_positions() -> PreTrainedModel:
    """The second layer of three knows no positions."""
    config = SmolLM3Config(num_attention_heads=4, num_key_value_heads=2, no_rope_layers=[1, 0, 1], **_COMMON)
    return _build(SmolLM3ForCausalLM, config)


def heads_of_22() -> PreTrainedModel:
    """Heads of a size that no lane divides, which native attention does not take."""
    return _build(LlamaForCausalLM, LlamaConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=22, **_COMMON))


def biases() -> PreTrainedModel:
    """A bias in every projection."""
    return _build(
        LlamaForCausalLM,
        LlamaConfig(num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True, **_COMMON),
    )


def layer_norms() -> PreTrainedModel:
    """Layer norms with biases: not an architecture that we fuse."""
    config = StableLmConfig(num_attention_heads=4, num_key_value_heads=2, rope_parameters=_HALF_ROTARY, **_COMMON)
    return _build(StableLmForCausalLM, config)


def factors() -> PreTrainedModel:
    """Factors of embeddings, scores, what blocks add, and logits."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_multiplier": 0.2}
    shape |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 5.0}
    return _build(GraniteForCausalLM, GraniteConfig(**shape, **_COMMON))


def norms_behind() -> PreTrainedModel:
    """Norms behind blocks only, and norms of all query heads, and all key heads, as one vector."""
    return _build(Olmo2ForCausalLM, Olmo2Config(num_attention_heads=4, num_key_value_heads=2, **_COMMON))


def positions_in_windows() -> PreTrainedModel:
    """Layers that see 20 tokens back, between one that sees all and knows no positions; norms behind blocks only."""
    config = Exaone4Config(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **_COMMON,
    )
    return _build(Exaone4ForCausalLM, config)


def own_fusion() -> PreTrainedModel:
    """Projections in one matrix by its own nature; the first half of each head is rotated."""
    config = Phi3Config(num_attention_heads=4, num_key_value_heads=2, rope_parameters=_HALF_ROTARY, **_COMMON)
    return _build(Phi3ForCausalLM, config)


def pairs_in_half_heads() -> PreTrainedModel:
    """Pairs of neighbours are rotated, in the first half of each head; norms behind each block, by other names."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": _HALF_ROTARY}
    return _build(Glm4ForCausalLM, Glm4Config(**shape, **_COMMON))


def exact_gelu() -> PreTrainedModel:
    """Feed-forward blocks whose activation no kernel computes."""
    shape = {**_COMMON, "intermediate_size": 1000, "hidden_act": "gelu"}
    return _build(LlamaForCausalLM, LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **shape))


def experts() -> PreTrainedModel:
    """Five experts in each layer, two of them for a token."""
    config = MixtralConfig(
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, **_COMMON
    )
    return _build(MixtralForCausalLM, config)


def shared_expert(**changes: object) -> PreTrainedModel:
    """Three of eight experts for a token, whose factors add up to less than 1, and a larger one for all tokens."""
    shape = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 8, **_COMMON}
    config = Qwen2MoeConfig(num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=3, **shape, **changes)
    return _build(Qwen2MoeForCausalLM, config)


def experts_in_some_layers() -> PreTrainedModel:
    """Experts of half the width of the block that another layer has."""
    config = Qwen3MoeConfig(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        mlp_only_layers=[1],
        **_COMMON,
    )
    return _build(Qwen3MoeForCausalLM, config)


def recurrent() -> PreTrainedModel:
    """Two gated delta nets, between them a layer with attention."""
    config = Qwen3_5TextConfig(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **_COMMON,
    )
    return _build(Qwen3_5ForCausalLM, config)


def mamba2_hybrid() -> PreTrainedModel:
    """A Mamba 2 layer before and behind one with attention, and experts."""
    config = GraniteMoeHybridConfig(
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "attention", "mamba"],
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_state=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        **_COMMON,
    )
    return _build(GraniteMoeHybridForCausalLM, config)


def short_convolutions() -> PreTrainedModel:
    """Two layers with a short convolution, between them one with attention."""
    config = Lfm2Config(
        num_attention_heads=4, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"], **_COMMON
    )
    return _build(Lfm2ForCausalLM, config)


def attention_beside_mamba2() -> PreTrainedModel:
    """Attention and Mamba 2 side by side in each layer."""
    config = FalconH1Config(
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_d_ssm=96,
        mamba_d_state=8,
        **_COMMON,
    )
    return _build(FalconH1ForCausalLM, config)


def int8() -> PreTrainedModel:
    """Six query heads over two KV heads, with 8-bit weights."""
    return rounded(grouped_heads())


def int8_experts() -> PreTrainedModel:
    """Experts with 8-bit weights."""
    return rounded(experts())


def with_served_heads(family: str, **changes: object) -> PreTrainedModel:
    """Two layers with heads of 64, which FlashInfer has kernels for; of gemma3's the first sees 40 tokens back.

    Args:
        family: `llama`, `qwen3` (with query and key norms), `olmo2` (with norms of all heads at once) or `gemma3`.
        changes: to its configuration.
    """
    shape = {
        **_COMMON,
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.1,
        **changes,
    }
    if family == "llama":
        return build(LlamaForCausalLM, LlamaConfig(**shape))
    if family == "qwen3":
        return build(Qwen3ForCausalLM, Qwen3Config(**shape))
    if family == "olmo2":
        return build(Olmo2ForCausalLM, Olmo2Config(**shape))
    layer_types = ["sliding_attention", "full_attention"] * (shape["num_hidden_layers"] // 2)
    return build(Gemma3ForCausalLM, Gemma3TextConfig(**shape, sliding_window=40, layer_types=layer_types))


def build(model_class: type[PreTrainedModel], config: object, *, seed: int = 0) -> PreTrainedModel:
    """A random model with our attention, as transformers initialises it."""
    config._attn_implementation = stock.IMPLEMENTATION
    torch.manual_seed(seed)
    return runner.prepare_model(model_class(config), "cpu")


def _build(model_class: type[PreTrainedModel], config: object) -> PreTrainedModel:
    model = build(model_class, config, seed=7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which would hide that one is left out
                parameter += 0.2 * torch.randn_like(parameter)
    return model


# The families without experts that our layers know.
FAST = (
    llama,
    grouped_heads,
    sliding_window,
    soft_caps,
    biases,
    neighbouring_pairs,
    no_positions,
    own_fusion,
    pairs_in_half_heads,
    factors,
    norms_behind,
    positions_in_windows,
)
