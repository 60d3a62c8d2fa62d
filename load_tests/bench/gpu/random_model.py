"""Models of any shape with random weights, made where they run: for speed no download is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from microturn.model import runner, stock

_STD = 0.02


@torch.no_grad()
def random_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with our attention, as `runner.load_model` would have loaded it.

    Args:
        config: what would stand in its config.json.
        device: where it is made and stays.
        dtype: of its weights, in which they are made.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation=stock.IMPLEMENTATION, dtype=dtype
        )
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(std=_STD)
    return runner.prepare_model(model, device)
