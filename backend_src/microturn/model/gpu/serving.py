"""A checked model on a GPU becomes a runner: its pool is sized by the remaining memory, and its passes are captured."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from microturn.kv.gpu_copier import staged_bytes_of
from microturn.kv.layer_groups import LayerShape
from microturn.kv.page_needs import PageNeeds
from microturn.kv.quantization import LayerScales
from microturn.kv.tensors import KVTensors
from microturn.model import recurrent
from microturn.model.gpu.flashinfer_attention import AttentionShape
from microturn.model.gpu.graphs import StepSize, padding_batch, step_sizes
from microturn.model.gpu.layers import TorchLayers
from microturn.model.gpu.runner import GpuRunner
from microturn.model.gpu.served_probe import check_graphs
from microturn.model.loaded import Loaded, needs_of, size_pool
from microturn.model.probe import Checked
from microturn.model.scores import Scores
from microturn.settings import Settings

# Memory of a captured graph besides the shared pool, and its memory per row.
_BYTES_PER_GRAPH = 8 << 20
# Left free for sampling (60 bytes per logit, at most 64 rows), for allocations that vary, and for the driver.
_SPARE_BYTES = 2 << 30


@dataclass(frozen=True)
class Serving:
    """A model on its GPU, in its type, and how to serve it.

    Attributes:
        model: see above.
        layers: KV shape of each layer; `scores` likewise.
        checked: what serves it.
        has_flashinfer: whether FlashInfer computes the attention, or torch.
        no_kernel_reason: see `Loaded`.
        kv_dtype: type of the pages.
        kv_scales: of each layer in 8-bit floats; None without.
        settings: with which it is to be served.
    """

    model: PreTrainedModel
    layers: Sequence[LayerShape]
    scores: Sequence[Scores]
    checked: Checked[TorchLayers]
    has_flashinfer: bool
    no_kernel_reason: str | None
    kv_dtype: torch.dtype
    kv_scales: Sequence[LayerScales] | None
    settings: Settings

    def make_ready(self, weights: str) -> Loaded:
        """Sizes the pool by the memory that is left, captures the passes, and compares them with launched ones.

        Args:
            weights: their type, by its name in the settings.

        Raises:
            InvalidArgument: the settings do not fit the model, or replayed passes differ.
        """
        settings = self.settings
        pool, kv_tokens, max_context = size_pool(settings, self.model, self.needs, self.free_tokens)
        runner = self.new_runner(pool.num_pages)
        runner.capture(self.sizes, max_context)
        most = settings.max_sessions, settings.max_batch_tokens, max_context
        check_graphs(runner, *most, has_float8=weights == "float8")
        return Loaded(
            runner=runner,
            needs=self.needs,
            pool=pool,
            kv_tokens=kv_tokens,
            max_context=max_context,
            weights=weights,
            attention="flashinfer" if self.has_flashinfer else "torch",
            no_fused_reason=self.checked.no_fused_reason,
            no_int8_reason=None,
            no_kernel_reason=self.no_kernel_reason,
        )

    @cached_property
    def needs(self) -> PageNeeds:
        return needs_of(self.model, self.layers, self.kv_dtype, self.settings)

    @cached_property
    def sizes(self) -> list[StepSize]:
        """Of the passes to capture, the largest first."""
        if not self.settings.cuda_graphs:
            return []
        shape = AttentionShape.of(self.model, self.layers, self.scores, self.model.dtype)
        return step_sizes(self.settings.max_sessions, self.settings.max_batch_tokens, shape)

    def new_runner(self, num_pages: int) -> GpuRunner:
        """A runner with `num_pages` pages and one for padding."""
        kv = KVTensors(
            self.layers,
            num_pages + 1,
            self.settings.page_size,
            self.kv_dtype,
            self.model.device,
            self.needs.groups,
            state_bytes=recurrent.state_bytes(self.model),
            float8=self.kv_scales,
        )
        return GpuRunner(
            self.model,
            kv,
            self.layers,
            self.scores,
            decoder=self.checked.decoder,
            has_flashinfer=self.has_flashinfer,
            max_tokens=self.settings.max_batch_tokens,
            accepts_embeds=self.checked.accepts_embeds,
            no_window_reason=self.checked.no_window_reason,
        )

    def free_tokens(self, max_context: int) -> int:
        """Tokens for which there is memory beside the largest passes, which are captured and run here without pages."""
        device = self.model.device
        free_before = free_bytes(device)
        rehearsal = self.new_runner(0)
        with_most_rows = sorted(self.sizes, key=lambda size: size.num_rows)[-1:]
        rehearsal.capture({*self.sizes[:1], *with_most_rows}, max_context)
        num_rows = min(self.settings.max_sessions, self.settings.max_batch_tokens)
        rehearsal.run(padding_batch(rehearsal.kv, self.settings.max_batch_tokens, num_rows))
        torch.cuda.synchronize(device)
        taken = free_before - torch.cuda.mem_get_info(device)[0]
        # Each graph keeps page ids per row and group of layers.
        num_words = self.needs.groups.num_groups * -(-max_context // self.settings.page_size)
        kept = len(self.sizes) * _BYTES_PER_GRAPH + sum(size.num_rows for size in self.sizes) * 4 * num_words
        del rehearsal
        free = self.least_free_bytes() - taken - kept - _SPARE_BYTES
        free -= 2 * staged_bytes_of(free)
        return max(0, free) // self.needs.token_bytes

    def least_free_bytes(self) -> int:
        """Free bytes of the GPU that has least of those that serve the model: here there is one."""
        return free_bytes(self.model.device)


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU's memory, after torch has released its cached memory."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
