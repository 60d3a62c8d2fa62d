"""Paged attention on a GPU by FlashInfer's kernels (Ye et al., 2025), in place.

Every step uses the batched prefill kernel: a decode row is an append of one token. It is planned on the host once per
step for all layers with the same window and soft cap, from page tables only; keys are split among thread blocks until
the GPU is full, whatever the number of rows.

With a fixed number of rows the kernels of a step can be captured as a CUDA graph. A smaller batch is padded: missing
rows have no queries; missing tokens have queries outside of the plan, whose results are ignored, and their keys are
written to the padding page, which no session has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from microturn.kv.layer_groups import LayerShape
from microturn.kv.layer_pages import LayerPages
from microturn.kv.tensors import KVTensors
from microturn.kv.transfer import upload
from microturn.model import rotary
from microturn.model.batch import Batch
from microturn.model.gpu.flashinfer_kernel import Kernel
from microturn.model.gpu.glue import Projection
from microturn.model.paged_step import PagedStep
from microturn.model.rotary import Rotary, Rotation
from microturn.model.scores import Scores

# Head sizes and types that FlashInfer's kernels support.
_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_KV_DTYPES = (*_DTYPES, torch.float8_e4m3fn)
_LEAST_CAPABILITY = (8, 0)

# Least size of the workspace for partial results of split keys; no step is captured that needs more than there is.
_WORKSPACE_BYTES = 512 << 20

# FlashInfer splits keys among two blocks for each multiprocessor, of which GPUs have up to 188 now.
MOST_BLOCKS = 2 * 192


def unavailable_reason(
    device: torch.device, shapes: Sequence[LayerShape], dtype: torch.dtype, kv_dtype: torch.dtype
) -> str | None:
    """The reason why these kernels cannot serve such layers on the device, or None if they can."""
    if device.type != "cuda":
        return f"FlashInfer runs on a GPU, not on the device '{device.type}'"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere, the first that FlashInfer serves"
    for shape in shapes:
        if shape.head_dim not in _HEAD_DIMS:
            return f"heads have {shape.head_dim} elements; FlashInfer serves {', '.join(map(str, _HEAD_DIMS))}"
    if dtype not in _DTYPES:
        return f"queries are {dtype}; FlashInfer takes {', '.join(map(str, _DTYPES))}"
    if kv_dtype not in _KV_DTYPES:
        return f"the KV cache is {kv_dtype}; FlashInfer takes {', '.join(map(str, _KV_DTYPES))}"
    try:
        import flashinfer  # noqa: F401  takes seconds; not imported for a CPU
    except ImportError as error:
        return f"FlashInfer cannot be imported ({error}); it comes with microturn[gpu]"
    return None


@dataclass(frozen=True)
class AttentionShape:
    """The attention shape of a model.

    Attributes:
        layers: KV shape of each layer.
        soft_caps: of each layer's scores; None without.
        num_heads: query heads of a layer.
        dtype: of the queries.
        rotary: of the model; needed for moved sinks.
    """

    layers: Sequence[LayerShape]
    soft_caps: Sequence[float | None]
    num_heads: int
    dtype: torch.dtype
    rotary: Rotary | None

    @cached_property
    def heads(self) -> frozenset[tuple[int, int]]:
        """Query heads of a key head, and elements of a head, of all layers."""
        return frozenset((self.num_heads // layer.num_kv_heads, layer.head_dim) for layer in self.layers)

    @property
    def workspace_bytes(self) -> int:
        """Size of the workspace: what any step needs that is not captured, with the largest tile in all blocks.

        More than the least where a key head has more than twenty query heads.
        """
        vectors = ((group_size * (64 if head_dim >= 256 else 128), head_dim) for group_size, head_dim in self.heads)
        return max(_WORKSPACE_BYTES, *(MOST_BLOCKS * tile * (head_dim + 1) * 4 for tile, head_dim in vectors))

    @classmethod
    def of(
        cls, model: PreTrainedModel, layers: Sequence[LayerShape], scores: Sequence[Scores], dtype: torch.dtype
    ) -> Self:
        """The shape of some of a model's layers, given their KV and their scores."""
        num_heads = int(model.config.get_text_config().num_attention_heads)
        return cls(layers, [of.soft_cap for of in scores], num_heads, dtype, rotary.installed(model))


def new_workspace(shape: AttentionShape, device: torch.device) -> Tensor:
    """Allocates the workspace that all steps on one stream share."""
    return torch.empty(shape.workspace_bytes, dtype=torch.uint8, device=device)


class FlashInferAttention:
    """The attention of consecutive steps; computes the same as `PagedAttention`.

    Args:
        shape: of the model.
        kv: the pages; the last one is for padding.
        workspace: see `new_workspace`.
        max_tokens: of a step.
        num_rows: fixed number of rows, so that steps can be captured; None for a variable number.
        max_pages: of a step with fixed rows, for each group of layers.
    """

    def __init__(
        self,
        shape: AttentionShape,
        kv: KVTensors,
        workspace: Tensor,
        max_tokens: int,
        num_rows: int | None = None,
        max_pages: int = 0,
    ) -> None:
        self._kv = kv
        self._rotary = shape.rotary
        self._num_tokens = max_tokens
        self._is_fixed = num_rows is not None
        self._groups: dict[tuple[int, int], _Group] = {}
        self._layers: list[tuple[_Writer, _Reader]] = []
        of_layers = zip(shape.layers, shape.soft_caps, kv.groups.places, strict=True)
        for number, (layer, soft_cap, place) in enumerate(of_layers):
            key = place.kind, place.group
            if key not in self._groups:
                self._groups[key] = _Group(_Writer(kv, max_tokens), {})
            group = self._groups[key]
            if (layer, soft_cap) not in group.readers:
                dtypes = shape.dtype, kv.layers[number].elements.dtype
                new_kernel = partial(Kernel, workspace, layer, soft_cap, shape.num_heads, kv.page_size, *dtypes)
                group.readers[layer, soft_cap] = _Reader(new_kernel, kv.device, num_rows, max_pages)
            self._layers.append((group.writer, group.readers[layer, soft_cap]))

    def plan(self, batch: Batch) -> None:
        """Plans a step. All work is enqueued behind the step before."""
        kv = self._kv
        if not self._is_fixed:
            self._num_tokens = batch.num_tokens
        for kind, of in enumerate(kv.groups.kinds):
            for number, step in enumerate(PagedStep.plan(batch, kv.page_size, kind, of.num_groups)):
                group = self._groups[kind, number]
                group.writer.plan(step.slots, self._num_tokens)
                for reader in group.readers.values():
                    reader.plan(step)

    def append_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """See `PagedAttention.append_and_attend`."""
        writer, _ = self._layers[layer]
        writer.write(k, v, self._kv.layers[layer])
        return self.attend(layer, q, scores)

    def append_projection(self, layer: int, projection: Projection) -> Tensor | None:
        """Writes the new keys and values of a layer into their pages, straight from its projection.

        Returns:
            The queries for `attend`, [tokens, heads, head_dim]; None if the kernel does not cover such projections:
            then nothing is written.
        """
        from microturn.model.gpu import projection_kernel  # needs OpenAI's Triton, which is not installed for a CPU

        pages, (writer, _) = self._kv.layers[layer], self._layers[layer]
        if not projection_kernel.covers(projection, pages):
            return None
        return projection_kernel.append_projection(projection, pages, writer.places)

    def attend(self, layer: int, q: Tensor, scores: Scores) -> Tensor:
        """Attends over each row's whole context, whose last keys and values have been written in this step."""
        _, reader = self._layers[layer]
        return reader.attend(q, self._kv.layers[layer], scores, partial(self._turn, layer))

    def _turn(self, layer: int, distances: Tensor) -> Rotation:
        assert self._rotary is not None, "moved sinks need the model's rotary embedding"
        return self._rotary.rotation(layer, distances)


class _Writer:
    """Writes a step's new keys and values into the pages of one group of layers.

    Attributes:
        places: int64 [max_tokens, 2], page and offset of each new token; always the same memory.
    """

    def __init__(self, kv: KVTensors, max_tokens: int) -> None:
        self._page_size = kv.page_size
        self._padding_slot = (kv.num_pages - 1) * kv.page_size
        self.places = torch.zeros(max_tokens, 2, dtype=torch.int64, device=kv.device)

    def plan(self, slots: NDArray[np.int64], num_tokens: int) -> None:
        """Plans where the tokens are written, including padding."""
        at = np.full(num_tokens, self._padding_slot)
        at[: len(slots)] = slots
        places = torch.from_numpy(np.stack(np.divmod(at, self._page_size), axis=1))
        self.places[:num_tokens] = upload(places, self.places.device)

    def write(self, k: Tensor, v: Tensor, kv: LayerPages) -> None:
        pages, offsets = self.places[: len(k)].unbind(1)
        kv.put(pages, offsets, k, v)


class _Reader:
    """Computes the attention over the pages of one group of layers.

    Moved sinks are computed separately: their queries are rotated back by the distance and attend to the sinks only,
    and the two results are merged. Such steps are not captured. Sink logits are added to the total weight at the end:
    what it was, to what it is then, is the sigmoid of the difference of their logarithms.
    """

    def __init__(
        self, new_kernel: Callable[..., Kernel], device: torch.device, num_rows: int | None, max_pages: int
    ) -> None:
        self._kernel = new_kernel(num_rows=num_rows, max_pages=max_pages)
        self._new_kernel = new_kernel
        self._device = device
        self._is_fixed = num_rows is not None
        self._sinks: Kernel | None = None
        # The rotated queries and their distances.
        self._moved: tuple[Tensor, Tensor] | None = None

    def plan(self, step: PagedStep) -> None:
        moved, moved_by = (torch.from_numpy(part) for part in step.moved_queries())
        self._moved = None
        if len(moved):
            assert not self._is_fixed, "moved sinks in a captured step"
            self._sinks = self._sinks or self._new_kernel(causal=False)
            sinks, step = step.apart()
            self._sinks.plan(sinks)
            self._moved = upload(moved, self._device), upload(-moved_by, self._device)
        self._kernel.plan(step)

    def attend(self, q: Tensor, kv: LayerPages, scores: Scores, rotation: Callable[[Tensor], Rotation]) -> Tensor:
        scale, sink_logits = scores.scale, scores.sink_logits
        if self._moved is None and sink_logits is None:
            return self._kernel.run(q, kv, scale)
        from flashinfer import merge_state

        out, weight = self._kernel.run_with_weight(q, kv, scale)
        if self._moved is not None:
            assert self._sinks is not None
            moved, turned_by = self._moved
            turned = rotation(turned_by)(q[moved].float()).to(q.dtype)
            of_sinks = self._sinks.run_with_weight(turned, kv, scale)
            out[moved], weight[moved] = merge_state(out[moved], weight[moved], *of_sinks)
        if sink_logits is not None:
            out = (out * torch.sigmoid(weight * math.log(2) - sink_logits)[..., None]).to(q.dtype)
        return out


@dataclass(frozen=True)
class _Group:
    """A group of layers: the writer of its pages, and a reader for each shape and soft cap of its layers."""

    writer: _Writer
    readers: dict[tuple[LayerShape, float | None], _Reader]
