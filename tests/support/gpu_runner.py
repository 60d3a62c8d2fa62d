"""The runner of GPUs for tests, on any device: with `--device cuda` all oracles go through it."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerGroups
from microturn.kv.tensors import KVTensors
from microturn.model import recurrent
from microturn.model.cpu.weights import NotKnown
from microturn.model.gpu.layers import TorchLayers
from microturn.model.gpu.runner import GpuRunner
from microturn.model.tracing import trace


def gpu_runner(
    model: PreTrainedModel,
    *,
    num_pages: int = 512,
    page_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    has_flashinfer: bool = False,
    max_tokens: int = 1024,
) -> GpuRunner:
    """A runner over a model where it lies and in its type, with a pool of its own.

    Args:
        num_pages: for each group of its layers.
        kv_dtype: of the pages; None is that of the model.
    """
    layers, scores = trace(model)
    groups = LayerGroups.of(layers)
    state_bytes = recurrent.state_bytes(model)
    kv = KVTensors(
        layers,
        (groups.num_groups + bool(state_bytes)) * num_pages + 1,
        page_size,
        kv_dtype or model.dtype,
        model.device,
        groups,
        state_bytes=state_bytes,
    )
    try:
        decoder = TorchLayers.of(model, layers)
    except NotKnown:
        decoder = None
    return GpuRunner(
        model,
        kv,
        layers,
        scores,
        decoder=decoder,
        has_flashinfer=has_flashinfer,
        max_tokens=max_tokens,
    )
