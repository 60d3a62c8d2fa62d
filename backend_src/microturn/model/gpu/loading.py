"""Loads a model on a GPU from the settings: load, check, fuse, capture, and size the pool by the remaining memory.

The model is loaded in the type that serves. Its first layers are checked in float32 with torch's attention: there a
difference is an error and not rounding (in bfloat16 a position off by one may change logits no more than rounding
does). FlashInfer's kernels are then compared with torch's separately, in the types that they will serve, and so is the
whole path that serves (`served_probe`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.layer_groups import LayerShape
from microturn.kv.tensors import KV_DTYPES
from microturn.model import latent_attention, recurrent, runner, tracing
from microturn.model.gpu import flashinfer_attention, float8
from microturn.model.gpu.attention_probe import check_attention
from microturn.model.gpu.few_layers import check_few_layers
from microturn.model.gpu.float8_weights import float8_products, name_of_type
from microturn.model.gpu.glue import Glue
from microturn.model.gpu.kv_scales import kv_scales
from microturn.model.gpu.layers import TorchLayers
from microturn.model.gpu.published_scales import PublishedScales
from microturn.model.gpu.served_probe import check_first_layers
from microturn.model.gpu.serving import Serving
from microturn.model.loaded import Loaded
from microturn.model.products import TorchLinear
from microturn.model.scores import Scores
from microturn.settings import Settings

log = logging.getLogger(__name__)

# The types that weights are loaded in; from bfloat16 they become 8-bit floats.
DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float8": torch.bfloat16,
    "float32": torch.float32,
}


def load(settings: Settings, device: torch.device) -> Loaded:
    """Loads a model and makes it ready to serve.

    Raises:
        InvalidArgument: it cannot be loaded or served, or the settings do not fit it.
    """
    return make_ready(runner.load_model(settings.model_dir, weights_dtype(settings), device), settings)


def weights_dtype(settings: Settings) -> torch.dtype:
    """The type that the weights are loaded in.

    Raises:
        InvalidArgument: they cannot have the set one on a GPU.
    """
    if settings.weights not in DTYPES:
        raise InvalidArgument(f"setting 'weights' is one of {', '.join(DTYPES)} on a GPU, not '{settings.weights}'")
    return DTYPES[settings.weights]


def make_ready(model: PreTrainedModel, settings: Settings) -> Loaded:
    """Checks a model on its device, fuses its weights, sizes its pool and captures its passes.

    Args:
        model: prepared for us (see `runner.prepare_model`), best in its serving type, else it is converted.
        settings: with which it is to be served.

    Raises:
        InvalidArgument: see `load`.
    """
    # No TF32: it would round the factors of products to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = weights_dtype(settings)
    if model.dtype != dtype:
        _convert(model, dtype)
    layers, scores = tracing.trace(model)
    checked, few = check_few_layers(model, layers, scores, settings.max_batch_tokens)
    kv_dtype = dtype if settings.kv_dtype == "auto" else KV_DTYPES[settings.kv_dtype]
    has_flashinfer, no_kernel_reason = uses_flashinfer(settings.attention, model, layers, scores, dtype, kv_dtype)
    served, glue = few.in_type_of(model), new_glue(settings, model.device)
    published = PublishedScales.read(settings.model_dir)
    scales = kv_scales(model, layers, published) if kv_dtype == float8.DTYPE else None
    products = float8_products(model, settings.weights, published, checked.no_fused_reason)
    check = partial(check_first_layers, served, few, kv_dtype=kv_dtype, scales=scales, has_flashinfer=has_flashinfer)
    if products is not None:  # everything but its rounding
        check(TorchLayers.of(served, few.layers, glue))
    if checked.decoder is not None:
        checked = replace(checked, decoder=TorchLayers.of(model, layers, glue, products or TorchLinear))
    weights = name_of_type(model, products, settings.weights)
    check(checked.decoder, has_float8=weights == "float8")
    del check, served, few  # their memory is for the pool
    serving = Serving(model, layers, scores, checked, has_flashinfer, no_kernel_reason, kv_dtype, scales, settings)
    return serving.make_ready(weights)


def new_glue(settings: Settings, device: torch.device) -> Glue:
    """What lies between products and attention, compiled on a GPU unless that is turned off."""
    return Glue.compiled() if settings.compiled_glue and device.type == "cuda" else Glue()


@torch.inference_mode()
def _convert(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Converts a model in place, one tensor after another; buffers that no file has, such as frequencies, stay."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                setattr(module, name, buffer.to(dtype))
    recurrent.install(model)  # its states are of the new type
    latent_attention.install(model)


def uses_flashinfer(
    wanted: str,
    model: PreTrainedModel,
    layers: Sequence[LayerShape],
    scores: Sequence[Scores],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> tuple[bool, str | None]:
    """Whether to use FlashInfer, after comparing its kernels with torch's; and why not, where it was not set otherwise.

    Raises:
        InvalidArgument: the set attention is not available, or FlashInfer's results differ.
    """
    if wanted == "native":
        raise InvalidArgument("setting 'attention' cannot be native on a GPU: that kernel is for a CPU")
    if wanted == "torch":
        return False, None
    reason = flashinfer_attention.unavailable_reason(model.device, layers, dtype, kv_dtype)
    if reason is None:
        check_attention(model, layers, scores, dtype, kv_dtype)
        return True, None
    if wanted == "flashinfer":
        raise InvalidArgument(f"setting 'attention' cannot be flashinfer here: {reason}")
    log.warning("attention through torch, which is slow: %s", reason)
    return False, reason
