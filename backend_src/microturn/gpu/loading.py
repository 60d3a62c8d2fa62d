"""From settings to a runner on a GPU: load, check, convert, capture, and a pool of what memory is left then.

The model is checked in float32, with torch's attention: there a difference is a mistake and not a rounding (in bfloat16
a position off by one may change logits no more than rounding does). FlashInfer's kernels are then held against torch's
by themselves, in the types that they will serve.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from microturn import runner
from microturn.errors import InvalidArgument
from microturn.gpu import flashinfer_attention
from microturn.gpu.attention_probe import check_attention
from microturn.gpu.decoder import TorchDecoder
from microturn.gpu.glue import Glue
from microturn.gpu.graphs import StepSize, nobodys_batch, step_sizes
from microturn.gpu.runner import GpuRunner
from microturn.kv_tensors import KV_DTYPES, KVTensors
from microturn.layer_groups import LayerGroups, LayerShape
from microturn.loaded import Loaded, size_pool
from microturn.probe import TOLERANCE, check_runner, new_pages
from microturn.settings import Settings

log = logging.getLogger(__name__)

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}

# What a captured graph takes besides the memory that all of them share.
_BYTES_PER_GRAPH = 16 << 20
# Left free for the driver, and for allocations that differ from one step to the next.
_SPARE_BYTES = 1 << 30


def load(settings: Settings, device: torch.device) -> Loaded:
    """Loads a model and makes it ready to serve.

    Raises:
        InvalidArgument: when it cannot be loaded or served, or the settings do not fit it.
    """
    if settings.weights not in _DTYPES:
        raise InvalidArgument(f"setting 'weights' is one of {', '.join(_DTYPES)} on a GPU, not '{settings.weights}'")
    if settings.deterministic:
        raise InvalidArgument("setting 'deterministic' cannot be true on a GPU: kernels depend on a step's size")
    return make_ready(runner.load_model(settings.model_dir, torch.float32, device), settings)


def make_ready(model: PreTrainedModel, settings: Settings) -> Loaded:
    """Checks a float32 model on its device, converts it, sizes its pool and captures its passes.

    Raises:
        InvalidArgument: see `load`.
    """
    # Sums in float32 are what it says: matrix units would round their factors to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    layers, device = runner.trace_layers(model), model.device
    checked = check_runner(
        type(model).__name__,
        lambda decoder: GpuRunner(
            model,
            new_pages(layers, device=device),
            layers,
            decoder=decoder,
            has_flashinfer=False,
            max_tokens=settings.max_batch_tokens,
        ),
        partial(TorchDecoder.of, model, layers),
        TOLERANCE,
    )
    dtype = _DTYPES[settings.weights]
    kv_dtype = dtype if settings.kv_dtype == "auto" else KV_DTYPES[settings.kv_dtype]
    has_flashinfer = _has_flashinfer(settings.attention, model, layers, dtype, kv_dtype)
    model.to(dtype)
    new_runner = partial(
        GpuRunner,
        model,
        layers=layers,
        decoder=None if checked.decoder is None else TorchDecoder.of(model, layers, _glue(device)),
        has_flashinfer=has_flashinfer,
        max_tokens=settings.max_batch_tokens,
        accepts_embeds=checked.accepts_embeds,
        no_window_reason=checked.no_window_reason,
    )
    groups = LayerGroups.of(layers)
    sizes = step_sizes(settings.max_sessions, settings.max_batch_tokens)

    def new_kv(num_pages: int) -> KVTensors:
        return KVTensors(layers, num_pages + 1, settings.page_size, kv_dtype, device, groups)

    def free_tokens(max_context: int) -> int:
        largest = [max(sizes), max((size for size in sizes if size.num_rows == size.num_tokens), default=max(sizes))]
        taken = _bytes_of_passes(new_runner(new_kv(0)), largest, max_context, settings.max_batch_tokens)
        gc.collect()
        torch.cuda.empty_cache()
        free = _free_bytes(device) - taken - len(sizes) * _BYTES_PER_GRAPH - _SPARE_BYTES
        return max(0, free) // (groups.num_groups * KVTensors.bytes_per_token(groups.slots, kv_dtype))

    pool, max_context = size_pool(settings, model, groups.num_groups, free_tokens)
    ready = new_runner(new_kv(pool.num_pages))
    ready.capture(sizes, max_context)
    weights = str(dtype).removeprefix("torch.")
    return Loaded(ready, pool, max_context, weights, "flashinfer" if has_flashinfer else "torch")


def _glue(device: torch.device) -> Glue:
    return Glue.compiled() if device.type == "cuda" else Glue()


def _has_flashinfer(
    wanted: str, model: PreTrainedModel, layers: Sequence[LayerShape], dtype: torch.dtype, kv_dtype: torch.dtype
) -> bool:
    """Whether FlashInfer attends; then its kernels give what torch's give.

    Raises:
        InvalidArgument: it is wanted and cannot, or something is wanted that no GPU has.
    """
    if wanted == "native":
        raise InvalidArgument("setting 'attention' cannot be native on a GPU: that kernel is for a CPU")
    if wanted == "torch":
        return False
    reason = flashinfer_attention.unavailable_reason(model.device, layers, dtype, kv_dtype)
    if reason is None:
        check_attention(model, layers, dtype, kv_dtype)
        return True
    if wanted == "flashinfer":
        raise InvalidArgument(f"setting 'attention' cannot be flashinfer here: {reason}")
    log.warning("attention through torch, which is slow: %s", reason)
    return False


def _bytes_of_passes(rehearsal: GpuRunner, sizes: Sequence[StepSize], max_context: int, max_tokens: int) -> int:
    """What passes take on the device besides pages: the largest are captured and run, over a page that is nobody's."""
    device = rehearsal.kv.device
    free_before = _free_bytes(device)
    rehearsal.capture(sizes, max_context)
    rehearsal.run(nobodys_batch(rehearsal.kv, StepSize(max_tokens, 1)))
    torch.cuda.synchronize(device)
    return free_before - _free_bytes(device)


def _free_bytes(device: torch.device) -> int:
    """What neither torch nor anybody else holds of a GPU's memory."""
    return torch.cuda.mem_get_info(device)[0]
