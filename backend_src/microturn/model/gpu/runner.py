"""Runs batches on a GPU: steps are enqueued, and small ones replayed from CUDA graphs.

If FlashInfer cannot serve a model, torch computes the attention: correct, but slow. Then nothing is captured, nor with
transformers' own layers, nor for a step with moved sinks. If sliding-window layers see moved sinks, torch computes the
attention of that step: which sinks their window hides depends on the query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.kv.tensors import KVTensors
from microturn.model.batch import Batch
from microturn.model.gpu.flashinfer_attention import AttentionShape, FlashInferAttention, new_workspace
from microturn.model.gpu.graphs import StepGraph, StepSize, best_size
from microturn.model.gpu.layers import TorchLayers
from microturn.model.runner import ModelRunner
from microturn.model.scores import Scores
from microturn.model.step_attention import Attention


class GpuRunner(ModelRunner):
    """A `ModelRunner` that returns before its work is done.

    Args:
        model: on its device, in its type.
        kv: the pages, on the same; the last one is for padding.
        layers: KV shape of each layer; `scores` likewise.
        decoder: our implementation of the layers; None runs transformers' own.
        has_flashinfer: whether FlashInfer computes the attention, or torch.
        max_tokens: maximum tokens of a step.
        accepts_embeds: result of the probe (see `Runner`); `no_window_reason` likewise.
    """

    is_asynchronous = True
    decoder: TorchLayers | None

    def __init__(
        self,
        model: PreTrainedModel,
        kv: KVTensors,
        layers: Sequence[LayerShape],
        scores: Sequence[Scores],
        *,
        decoder: TorchLayers | None,
        has_flashinfer: bool,
        max_tokens: int,
        accepts_embeds: bool = True,
        no_window_reason: str | None = None,
    ) -> None:
        super().__init__(
            model,
            kv,
            decoder=decoder,
            accepts_embeds=accepts_embeds,
            no_window_reason=no_window_reason,
        )
        self._shape = AttentionShape.of(model, layers, scores, model.dtype)
        self._attention: FlashInferAttention | None = None
        if has_flashinfer:
            self._workspace = new_workspace(self._shape, kv.device)
            self._attention = FlashInferAttention(self._shape, kv, self._workspace, max_tokens)
        self._graphs: dict[StepSize, StepGraph] = {}
        places = zip(layers, kv.groups.places, strict=True)
        self._windowed_kinds = {place.kind for layer, place in places if layer.window is not None}

    @torch.inference_mode()
    def capture(self, sizes: Iterable[StepSize], max_context: int) -> None:
        """Captures passes of these sizes, largest first, for contexts of up to `max_context` tokens, if possible."""
        if self.decoder is None or self._attention is None:
            return
        pool = torch.cuda.graph_pool_handle()
        pages_per_row = -(-max_context // self.kv.page_size)
        sizes = sorted(sizes, reverse=True)
        most_rows = max((size.num_rows for size in sizes), default=0)
        logits = torch.empty(most_rows, self.vocab_size, device=self.kv.device)
        for size in tqdm(sizes, desc="capturing CUDA graphs", unit="graph", leave=False):
            max_pages = max(size.num_tokens, size.num_rows * pages_per_row)
            attention = FlashInferAttention(
                self._shape, self.kv, self._workspace, size.num_tokens, size.num_planned, max_pages
            )
            hidden = torch.zeros(size.num_tokens, self.hidden_size, dtype=self.model.dtype, device=self.kv.device)
            self._graphs[size] = StepGraph(self.decoder, attention, self.kv, size, hidden, logits, pool)

    @property
    def has_graphs(self) -> bool:
        """Whether some steps are replayed."""
        return bool(self._graphs)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Has all steps launched meanwhile."""
        graphs, self._graphs = self._graphs, {}
        try:
            yield
        finally:
            self._graphs = graphs

    def _pass(self, batch: Batch, positions: Tensor, wanted: Tensor) -> Tensor:
        graph = self._graph_for(batch)
        if graph is None:
            return super()._pass(batch, positions, wanted)
        return graph.replay(batch, self._embed(batch), positions, wanted)

    def _graph_for(self, batch: Batch) -> StepGraph | None:
        """The best graph for a batch, if one holds it."""
        if _has_moved_sinks(batch, range(len(self.kv.groups.kinds))):
            return None
        size = best_size(self._graphs, batch, self._shape)
        return None if size is None else self._graphs[size]

    def _attend(self, batch: Batch) -> Attention:
        if self._attention is None or _has_moved_sinks(batch, self._windowed_kinds):
            return super()._attend(batch)
        self._attention.plan(batch)
        return self._attention


def _has_moved_sinks(batch: Batch, kinds: Iterable[int]) -> bool:
    """Whether some of these kinds of layers see moved sinks."""
    views = (row.others[kind - 1] if kind else row for kind in kinds for row in batch.rows)
    return any(seen.num_sinks and seen.num_evicted for seen in views)
