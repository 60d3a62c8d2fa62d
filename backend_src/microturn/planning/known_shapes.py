"""Named model shapes, and shapes read from a configuration: the model is built without memory for weights.

So it counts what transformers would load, for any architecture, and each layer's KV shape, window and recurrent state
are traced as when the engine loads the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microturn.errors import InvalidArgument
from microturn.planning.shape import Experts, ModelShape

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

_LLAMA = {"model_type": "llama", "max_position_embeddings": 131072, "vocab_size": 128256}

# The parts of the published config.json files that determine sizes.
NAMED_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "gemma3-270m": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3.1-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
    },
}


def read_shape(model: str) -> ModelShape:
    """The shape of a model.

    Args:
        model: a name in `NAMED_CONFIGS`, or the path of a model directory, its config.json or a GGUF file; no weights
            are read.

    Raises:
        InvalidArgument: there is no such model, or it is not a causal language model that can be served.
    """
    if model in NAMED_CONFIGS:
        return shape_of(model, NAMED_CONFIGS[model])
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        from microturn.zoo.gguf_conversion import gguf_config

        return shape_of(path.stem, gguf_config(path))
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_bytes(), object_hook=_number_or_object)
    except FileNotFoundError:
        names = ", ".join(sorted(NAMED_CONFIGS))
        raise InvalidArgument(
            f"no {path}: give a model directory, its config.json, a GGUF file, or one of {names}"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be read as a model's configuration: {error}") from None
    return shape_of(path.resolve().parent.name, config)


def shape_of(name: str, config: object) -> ModelShape:
    """The shape of the model that a configuration describes.

    Args:
        name: of the shape.
        config: content of its config.json; of a multimodal one the language part counts.

    Raises:
        InvalidArgument: it is not a causal language model that can be served.
    """
    from huggingface_hub.errors import StrictDataclassError
    from torch import nn

    from microturn.model import latent_attention, recurrent
    from microturn.model.positions import num_positions_of
    from microturn.model.tracing import trace_layers

    if not isinstance(config, Mapping) or not isinstance(config.get("model_type"), str):
        raise InvalidArgument(f"the configuration of {name} names no model_type")
    try:
        model, stored_dtype = _build(config)
        layers = trace_layers(model)
    except (StrictDataclassError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidArgument(f"the configuration of {name} makes no causal language model: {reason}") from error
    text = model.config.get_text_config(decoder=True)
    # By their weights, which some models share between layers.
    products = {module.weight: module for module in model.modules() if isinstance(module, nn.Linear)}.values()
    embeddings = model.get_input_embeddings().weight
    experts = _experts(model, text)
    return ModelShape(
        name=name,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        num_product_params=sum(p.numel() for product in products for p in product.parameters()) + experts.num_params,
        num_product_rows=sum(product.out_features for product in products) + experts.num_rows,
        num_embedding_params=embeddings.numel(),
        stored_bytes=stored_dtype.itemsize,
        shares_head=model.get_output_embeddings().weight is embeddings,
        layers=tuple(layers),
        num_heads=int(text.num_attention_heads),
        max_context=num_positions_of(model) or 0,
        num_layers=text.num_hidden_layers,
        experts=experts,
        state_bytes=recurrent.state_bytes(model),
        is_latent=latent_attention.is_installed(model),
    )


def _build(config: Mapping[str, Any]) -> tuple[PreTrainedModel, torch.dtype]:
    """The model of a configuration, in float32 on the device "meta", and the type that its weights are stored in."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from microturn.model import latent_attention, recurrent
    from microturn.model import paged_attention as paged
    from microturn.zoo.store import is_multimodal

    paged.register()
    whole = AutoConfig.for_model(**config)
    text = whole.get_text_config(decoder=True)
    stored_dtype = text.dtype or whole.dtype or torch.float32
    served = text if is_multimodal(config) else whole
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            served, dtype=torch.float32, attn_implementation=paged.IMPLEMENTATION
        ).eval()
        model.set_experts_implementation("batched_mm")  # the others want certain types or numbers of rows
        recurrent.install(model)
        latent_attention.install(model)
    return model, stored_dtype


def _number_or_object(said: dict[str, Any]) -> object:
    """An object of a config.json; transformers writes infinity as one."""
    return float(said["__float__"]) if said.keys() == {"__float__"} else said


def _experts(model: nn.Module, config: PretrainedConfig) -> Experts:
    """The experts of a model: stacks [experts, out, in] in modules that say how many there are."""
    stacks = [
        parameter
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.dim() == 3 and getattr(module, "num_experts", None) == len(parameter)
    ]
    num_chosen = getattr(config, "num_experts_per_tok", None)
    if not stacks or num_chosen is None:
        return Experts()
    return Experts(
        num_params=sum(stack.numel() for stack in stacks),
        num_rows=sum(stack.shape[0] * stack.shape[1] for stack in stacks),
        chosen_share=num_chosen / len(stacks[0]),
    )
