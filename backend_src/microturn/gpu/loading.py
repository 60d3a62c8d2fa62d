"""From settings to a runner on a GPU: load, check, convert, capture, and a pool of what memory is left then.

The model is checked in float32, with torch's attention: there a difference is a mistake and not a rounding (in bfloat16
a position off by one may change logits no more than rounding does). FlashInfer's kernels are then held against torch's
by themselves, in the types that they will serve.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from transformers import PreTrainedModel

from microturn import runner
from microturn.errors import InvalidArgument
from microturn.gpu import flashinfer_attention
from microturn.gpu.attention_probe import check_attention
from microturn.gpu.decoder import TorchDecoder
from microturn.gpu.glue import Glue
from microturn.gpu.graphs import StepSize, padding_batch, step_sizes
from microturn.gpu.kv_copier import staged_bytes_of
from microturn.gpu.runner import GpuRunner
from microturn.kv_tensors import KV_DTYPES, KVTensors
from microturn.layer_groups import LayerGroups, LayerShape
from microturn.loaded import Loaded, size_pool
from microturn.probe import TOLERANCE, Checked, check_runner, new_pages
from microturn.settings import Settings

log = logging.getLogger(__name__)

_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}

# What a captured graph takes besides the memory that all of them share, and what it keeps for its rows.
_BYTES_PER_GRAPH = 8 << 20
# Left free for choosing tokens (60 bytes per logit, of 64 rows at most), for allocations that differ from one step to
# the next, and for the driver.
_SPARE_BYTES = 2 << 30


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
    layers = runner.trace_layers(model)
    checked = check_runner(
        model,
        layers,
        lambda decoder: GpuRunner(
            model,
            new_pages(layers, device=model.device),
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
    if checked.decoder is not None:  # the new one takes the place of a second set of weights, in float32
        glue = Glue.compiled() if model.device.type == "cuda" else Glue()
        checked = replace(checked, decoder=TorchDecoder.of(model, layers, glue))
    serving = _Serving(model, layers, checked, has_flashinfer, kv_dtype, settings)
    pool, max_context = size_pool(settings, model, serving.groups.num_groups, serving.free_tokens)
    ready = serving.new_runner(pool.num_pages)
    ready.capture(serving.sizes, max_context)
    weights = str(dtype).removeprefix("torch.")
    return Loaded(ready, pool, max_context, weights, "flashinfer" if has_flashinfer else "torch")


@dataclass(frozen=True)
class _Serving:
    """A converted model, and how it is served."""

    model: PreTrainedModel
    layers: Sequence[LayerShape]
    checked: Checked[TorchDecoder]
    has_flashinfer: bool
    kv_dtype: torch.dtype
    settings: Settings

    @cached_property
    def groups(self) -> LayerGroups:
        return LayerGroups.of(self.layers)

    @cached_property
    def sizes(self) -> list[StepSize]:
        return step_sizes(self.settings.max_sessions, self.settings.max_batch_tokens)

    def new_runner(self, num_pages: int) -> GpuRunner:
        """With so many pages, and one for padding."""
        kv = KVTensors(
            self.layers, num_pages + 1, self.settings.page_size, self.kv_dtype, self.model.device, self.groups
        )
        return GpuRunner(
            self.model,
            kv,
            self.layers,
            decoder=self.checked.decoder,
            has_flashinfer=self.has_flashinfer,
            max_tokens=self.settings.max_batch_tokens,
            accepts_embeds=self.checked.accepts_embeds,
            no_window_reason=self.checked.no_window_reason,
        )

    def free_tokens(self, max_context: int) -> int:
        """For how many there is memory beside the largest passes: these are captured and run here, over no pages."""
        device, free_before = self.model.device, _free_bytes(self.model.device)
        rehearsal = self.new_runner(0)
        rehearsal.capture({self.sizes[0], max(size for size in self.sizes if size.is_decode)}, max_context)
        num_rows = min(self.settings.max_sessions, self.settings.max_batch_tokens)
        rehearsal.run(padding_batch(rehearsal.kv, StepSize(self.settings.max_batch_tokens, num_rows)))
        torch.cuda.synchronize(device)
        taken = free_before - torch.cuda.mem_get_info(device)[0]
        # Each graph keeps for each of its rows logits, in float32, and for each group of layers numbers of pages.
        num_words = rehearsal.vocab_size + self.groups.num_groups * -(-max_context // self.settings.page_size)
        kept = len(self.sizes) * _BYTES_PER_GRAPH + sum(size.num_rows for size in self.sizes) * 4 * num_words
        del rehearsal
        free = _free_bytes(device) - taken - kept - _SPARE_BYTES
        free -= 2 * staged_bytes_of(free)
        return max(0, free) // (self.groups.num_groups * KVTensors.bytes_per_token(self.groups.slots, self.kv_dtype))


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


def _free_bytes(device: torch.device) -> int:
    """What nobody holds of a GPU's memory, once torch has given back what it keeps for later."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
